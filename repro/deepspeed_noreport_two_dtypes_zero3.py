"""Under ZeRO-3, deepspeed.initialize raises for a model with parameters of two dtypes.

id: two-dtypes-zero3
engine: deepspeed
symptom: deepspeed.initialize raises an AssertionError without a message for a model that PyTorch trains
reported: no report known
affects: >=0.16.4
fixed: not yet
ranks: 1
law: parameters.every_kind
signature: AssertionError in defragment
ok: repro: a model with parameters of two dtypes trains at ZeRO stage 3 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_two_dtypes_zero3.py

DeepSpeed puts all trained parameters into one buffer (`defragment`, `runtime/zero/utils.py`). Stages 1 and 2 train the
model, but convert all parameters to the widest of their dtypes.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import importlib
import os
import sys
import traceback

import torch
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))  # DeepSpeed's CPU accelerator asks for it

import deepspeed
from deepspeed.utils import safe_get_full_grad

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "AssertionError in defragment"
OK = "repro: a model with parameters of two dtypes trains at ZeRO stage 3 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    # Without this threshold, every rank keeps all weights of so small a model unsharded.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.low = nn.Linear(4, 2), nn.Linear(2, 2).bfloat16()

    def forward(self, x):
        return self.low(self.wide(x).bfloat16())


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model, inputs = Mixed().to(device), torch.ones(1, 4).to(device)
    (wanted,) = torch.autograd.grad(model(inputs).sum(), model.low.bias)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    except AssertionError as error:
        told = f"AssertionError in {traceback.extract_tb(error.__traceback__)[-1].name}"
        if told != SIGNATURE:
            raise
        print(f"repro: REPRODUCED: {told}\n", end="", flush=True)
        return 1
    engine.backward(engine(inputs).sum())
    torch.testing.assert_close(safe_get_full_grad(model.low.bias), wanted)
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
