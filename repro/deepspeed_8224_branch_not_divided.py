"""The accumulation division of engine.backward misses a branch of the loss that bypasses the engine's output.

id: 8224
engine: deepspeed
symptom: gradients too large if a loss joins engine(x) and engine.module(y), with accumulation
reported: https://github.com/deepspeedai/DeepSpeed/issues/8224
affects: >=0.18.3,<=0.19.5
fixed: 0.19.6
broken: 0.19.5
ranks: 1
law: backward.bypass
signature: the branch through engine.module was not divided
ok: repro: a loss over engine(x) and engine.module(y) at ZeRO stages 1 to 3 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_8224_branch_not_divided.py

A hook on the outputs of the engine's forward divides the gradient. A gradient that does not pass through these outputs
is not divided. Fixed by #8245, which divides the loss given to engine.backward.

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

SIGNATURE = "the branch through engine.module was not divided"
OK = "repro: a loss over engine(x) and engine.module(y) at ZeRO stages 1 to 3 OK."
STAGES = (1, 2, 3)
STEPS = 2
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": STEPS,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
}


def new_model(device):
    model = nn.Linear(1, 1, bias=False).to(device)
    nn.init.zeros_(model.weight)
    return model


def used_gradient(stage, x, y):
    """Return what the step at the end of STEPS equal micro-batches subtracts from the weight."""
    model = new_model(x.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    for _ in range(STEPS):
        engine.backward((engine(x) + engine.module(y)).sum())
        engine.step()
    with deepspeed.zero.GatheredParameters([model.weight]):
        return -model.weight.item()


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    x, y = torch.full((1, 1), 2.0, device=device), torch.full((1, 1), 5.0, device=device)
    model = new_model(device)
    # For equal micro-batches, the mean is the gradient of one micro-batch.
    through, around = (torch.autograd.grad(model(each).sum(), model.weight)[0].item() for each in (x, y))
    wanted, undivided = through + around, through + STEPS * around

    used = {stage: used_gradient(stage, x, y) for stage in STAGES}
    if all(gradient == undivided for gradient in used.values()):
        print(f"repro: REPRODUCED: {SIGNATURE}: by stage {used} instead of {wanted}\n", end="", flush=True)
        return 1
    assert all(gradient == wanted for gradient in used.values()), f"by stage {used} instead of {wanted}"
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
