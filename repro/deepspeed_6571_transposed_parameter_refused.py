"""deepspeed.initialize raises for a model with a parameter that is not contiguous.

id: 6571
engine: deepspeed
symptom: deepspeed.initialize raises for a transposed parameter, which PyTorch trains
reported: https://github.com/deepspeedai/DeepSpeed/issues/6571
affects: >=0.19.8
fixed: not yet
ranks: 1
law: parameters.every_kind
signature: deepspeed.initialize refuses a parameter that is not contiguous
ok: repro: a transposed parameter trains at ZeRO stage 1 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_6571_transposed_parameter_refused.py

At the start the engine broadcasts the bytes of every parameter, `p.data.view(torch.uint8)`. Releases up to 0.19.7
broadcast `p.data`, which gloo accepts and NCCL refuses ("Tensors must be contiguous", as in the report).

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
from deepspeed.utils import safe_get_full_grad

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "deepspeed.initialize refuses a parameter that is not contiguous"
OK = "repro: a transposed parameter trains at ZeRO stage 1 OK."
WORDS = ("self.stride(-1) must be 1 to view", "must be contiguous")
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2).t())

    def forward(self, x):
        return x @ self.weight


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model, inputs = Transposed().to(device), torch.ones(1, 2).to(device)
    (wanted,) = torch.autograd.grad(model(inputs).sum(), model.weight)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    except (RuntimeError, ValueError) as error:
        if not any(words in str(error) for words in WORDS):
            raise
        print(f"repro: REPRODUCED: {SIGNATURE}: {error}\n", end="", flush=True)
        return 1
    engine.backward(engine(inputs).sum())
    torch.testing.assert_close(safe_get_full_grad(model.weight), wanted)
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
