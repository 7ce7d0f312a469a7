"""The accumulation division of loss.backward() misses a branch of the loss that bypasses the engine's output.

id: 8224-direct
engine: deepspeed
symptom: gradients too large if loss.backward() joins engine(x) and engine.module(y), with accumulation
reported: https://github.com/deepspeedai/DeepSpeed/issues/8224
affects: >=0.19.8
fixed: not yet
ranks: 1
law: backward.bypass
signature: the branch through engine.module was not divided
ok: repro: loss.backward() over engine(x) and engine.module(y) OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_8224_branch_not_divided_direct.py

#8245 divides the loss that is given to engine.backward. With loss.backward(), a hook on the outputs of the engine's
forward divides the gradient, and a gradient that does not pass through these outputs is not divided.

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
OK = "repro: loss.backward() over engine(x) and engine.module(y) OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
}


def build(model, zero, optimizer=None, **options):
    config = {**CONFIG, **options, "zero_optimization": zero}
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def main():
    deepspeed.init_distributed()
    wrong = []
    for stage in (1, 2):
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        engine = build(model, {"stage": stage}, gradient_accumulation_steps=2)
        for _ in range(2):
            (engine(torch.ones(1, 1)) + engine.module(torch.ones(1, 1))).sum().backward()
            engine.step()
        if model.weight.item() != -2:
            wrong.append(f"stage {stage}: got {model.weight.item()}, expected -2")
    if wrong:
        print(f"repro: REPRODUCED: {SIGNATURE}: {wrong}\n", end="", flush=True)
        return 1
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
