"""The first step at ZeRO stage 1 or 2 raises on a CPU: the flat buffer of the weights is part of an autograd graph.

id: 7948
engine: deepspeed
symptom: with more than one rank the first engine.step() raises RuntimeError about a view modified in place
reported: https://github.com/deepspeedai/DeepSpeed/pull/7948
affects: >=0.18.7,<=0.18.9
fixed: 0.19.0
broken: 0.18.9
ranks: 2
law: training.sgd_step
signature: is a view and is being modified inplace
ok: repro: a step at ZeRO stages 1 and 2 on a CPU OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_7948_split_view_inplace.py

DeepSpeed concatenates parameters that require a gradient into the flat buffer, so the buffer has a grad_fn. Autograd
then refuses the step's writes into parts of the buffer. One rank alone does not raise.

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

SIGNATURE = "is a view and is being modified inplace"
OK = "repro: a step at ZeRO stages 1 and 2 on a CPU OK."
STAGES = (1, 2)
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
}


def error_of_first_step(stage, inputs):
    """Return the text of the error known of this release, or None if the step is right."""
    model = nn.Linear(1, 1).to(inputs.device)
    for param in model.parameters():
        nn.init.zeros_(param)
    wanted = torch.autograd.grad(model(inputs).sum(), list(model.parameters()))

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.backward(engine(inputs).sum())
    try:
        engine.step()
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        return str(error)
    # SGD with lr 1 has subtracted the gradient from zero.
    torch.testing.assert_close([-param for param in model.parameters()], list(wanted))
    return None


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    errors = [error_of_first_step(stage, torch.full((1, 1), 2.0, device=device)) for stage in STAGES]
    if all(errors):
        print(f"repro: REPRODUCED: {errors[0]}\n", end="", flush=True)
        return 1
    assert not any(errors), f"at stages {STAGES}: {errors}"
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
