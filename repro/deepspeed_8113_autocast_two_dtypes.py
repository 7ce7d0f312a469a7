"""With torch_autocast at ZeRO stage 3, DeepSpeed cannot gather weights of two dtypes together.

id: 8113
engine: deepspeed
symptom: ZeRO-3 with torch_autocast and fp32 adapters of a bf16 model: all params must have the same dtype
reported: https://github.com/deepspeedai/DeepSpeed/pull/8113
affects: >=0.18.8,<=0.19.1
fixed: 0.19.3
broken: 0.19.1
ranks: 2
law: parameters.every_kind
signature: all params must have the same dtype
ok: repro: an fp32 adapter of a bf16 weight under torch_autocast OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_8113_autocast_two_dtypes.py

DeepSpeed groups weights for one gather by the dtype in which it sends them, which is bf16 for all weights under
torch_autocast. Then DeepSpeed requires that the weights themselves have one dtype.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import importlib
import os
import sys

import torch
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))  # DeepSpeed's CPU accelerator asks for it

import deepspeed

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "all params must have the same dtype"
OK = "repro: an fp32 adapter of a bf16 weight under torch_autocast OK."

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
    "torch_autocast": {
        "enabled": True,
        "dtype": "bfloat16",
        "lower_precision_safe_modules": ["torch.nn.Linear", "__main__.LinearWithAdapter"],
    },
    # Without this threshold, every rank keeps all weights of so small a model unsharded.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


class LinearWithAdapter(nn.Module):
    """A frozen weight in bf16 and its adapter in fp32."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16), requires_grad=False)
        self.adapter = nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        return nn.functional.linear(x, self.weight) + nn.functional.linear(x, self.adapter)


def main():
    deepspeed.init_distributed()
    model = LinearWithAdapter()
    optimizer = torch.optim.SGD([model.adapter], lr=1.0)
    try:
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
        engine.backward(engine(torch.ones(1, 4, device=engine.device)).sum())
        engine.step()
    except AssertionError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
