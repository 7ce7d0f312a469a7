"""At ZeRO stage 3, attaching a module after initialize makes the next forward raise.

id: 8009
engine: deepspeed
symptom: ZeRO-3: AttributeError: 'dict' object has no attribute '_in_forward' after a submodule was added
reported: https://github.com/deepspeedai/DeepSpeed/issues/6961
affects: ==0.18.8
fixed: 0.19.1
broken: 0.18.8
ranks: 1
law: parameters.late_module
signature: 'dict' object has no attribute '_in_forward'
ok: repro: a module attached after initialize OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_8009_module_attached_late.py

The engine sets a mark in the container of each module's parameters. At the start the engine replaces these containers
by a class of its own. A module that is attached later keeps its plain dict (torch 2.5 and later).

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

SIGNATURE = "'dict' object has no attribute '_in_forward'"
OK = "repro: a module attached after initialize OK."

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 3},
}


def main():
    deepspeed.init_distributed()
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    engine.module.append(nn.Tanh())
    try:
        engine(torch.ones(1, 2, device=engine.device))
    except AttributeError as error:
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
