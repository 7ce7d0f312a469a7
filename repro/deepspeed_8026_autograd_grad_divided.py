"""DeepSpeed divides the result of torch.autograd.grad of an engine's output by the gradient accumulation steps.

id: 8026-autograd
engine: deepspeed
symptom: torch.autograd.grad(engine(x).sum(), x) is a quarter of the right value at four accumulation steps
reported: https://github.com/deepspeedai/DeepSpeed/pull/8026
affects: >=0.18.3
fixed: not yet
ranks: 1
law: backward.autograd_grad
signature: divided by the 4 accumulation steps
ok: repro: torch.autograd.grad of the output, 4 accumulation steps, at ZeRO stage 1 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_8026_autograd_grad_divided.py

The failure is silent at stage 1. The hook on the engine's output divides, and begins a backward of the engine, in any
backward that passes through this output; #8026 exempts torch.func only. For the same reason stage 2 raises IndexError,
and stage 0 RuntimeError. Releases up to 0.18.2 are right.

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

OK = "repro: torch.autograd.grad of the output, 4 accumulation steps, at ZeRO stage 1 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = nn.Linear(2, 1, bias=False).to(device)
    nn.init.constant_(model.weight, 4.0)
    x = torch.tensor([[1.0, 3.0]], device=device, requires_grad=True)
    (wanted,) = torch.autograd.grad(model(x).sum(), x)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    (got,) = torch.autograd.grad(engine(x).sum(), x)
    if torch.equal(got, wanted / 4):
        found = f"{got.tolist()} instead of {wanted.tolist()}: divided by the 4 accumulation steps"
        print(f"repro: REPRODUCED: {found}\n", end="", flush=True)
        return 1
    torch.testing.assert_close(got, wanted)
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
