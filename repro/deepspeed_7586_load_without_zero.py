"""load_checkpoint raises for a bf16 checkpoint at ZeRO stage 0.

id: 7586
engine: deepspeed
symptom: in bf16 without ZeRO load_checkpoint raises, because it looks for a ZeRO checkpoint
reported: https://github.com/deepspeedai/DeepSpeed/issues/7571
affects: ==0.17.6
fixed: 0.18.0
broken: 0.17.6
ranks: 1
law: state.resume
signature: load_checkpoint at stage 0 reads a ZeRO checkpoint
ok: repro: load_checkpoint in bf16 at stage 0 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_7586_load_without_zero.py

In bf16 the engine loads the optimizer state as if the optimizer were a ZeRO optimizer, but the optimizer of stage 0 is
none.

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

SIGNATURE = "load_checkpoint at stage 0 reads a ZeRO checkpoint"
OK = "repro: load_checkpoint in bf16 at stage 0 OK."

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
    engine = build()
    step(engine)
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder)
        try:
            engine.load_checkpoint(folder)
        except (AttributeError, KeyError, FileNotFoundError) as error:
            print(f"repro: REPRODUCED: {SIGNATURE}: {type(error).__name__}: {error}\n", end="", flush=True)
            return 1
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
