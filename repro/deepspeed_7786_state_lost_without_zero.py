"""In bf16 at ZeRO stage 0, load_checkpoint does not restore the optimizer state.

id: 7786
engine: deepspeed
symptom: silent: in bf16 without ZeRO, training resumes from a checkpoint without its optimizer state
reported: https://github.com/deepspeedai/DeepSpeed/pull/7786
affects: ==0.18.3
fixed: 0.18.5
broken: 0.18.3
ranks: 1
law: state.resume
signature: the momentum is lost
ok: repro: momentum after load_checkpoint in bf16 at stage 0 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_7786_state_lost_without_zero.py

In bf16 the engine treats the optimizer state as that of ZeRO, which DeepSpeed saves and loads separately. Since 0.18.0
DeepSpeed does not load this separate state at stage 0.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import importlib
import os
import sys
import tempfile

import torch
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))  # DeepSpeed's CPU accelerator asks for it

import deepspeed

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "the momentum is lost"
OK = "repro: momentum after load_checkpoint in bf16 at stage 0 OK."

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 0},
}


def build():
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]


def step(engine):
    """Run a step with the gradient 1 and return how far it moves the weight."""
    before = engine.module.weight.item()
    engine.backward(engine(torch.ones(1, 1, dtype=torch.bfloat16, device=engine.device)).sum())
    engine.step()
    return engine.module.weight.item() - before


def main():
    deepspeed.init_distributed()
    engine, resumed = build(), build()
    step(engine)
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder)
        resumed.load_checkpoint(folder)
    wanted, moved = step(engine), step(resumed)
    assert wanted == -1.5, wanted  # half of the momentum 1 of the first step, plus the gradient 1
    if moved == -1.0:  # the gradient alone
        print(f"repro: REPRODUCED: {SIGNATURE}: moved by {moved} instead of {wanted}\n", end="", flush=True)
        return 1
    assert moved == wanted, moved
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
