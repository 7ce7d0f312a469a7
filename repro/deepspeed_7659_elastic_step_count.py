"""With elastic_checkpoint, save_checkpoint raises for the optimizer state of torch's Adam.

id: 7659
engine: deepspeed
symptom: with elastic_checkpoint, save_checkpoint raises for optimizer state without dimensions, such as a step count
reported: https://github.com/deepspeedai/DeepSpeed/pull/7659
affects: >=0.16.4,<=0.18.1
fixed: 0.18.2
broken: 0.17.6
ranks: 1
law: state.resume
signature: slice() cannot be applied to a 0-dim tensor
ok: repro: an elastic checkpoint of Adam OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_7659_elastic_step_count.py

save_checkpoint removes the padding of each tensor of the optimizer state by a slice.

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

SIGNATURE = "slice() cannot be applied to a 0-dim tensor"
OK = "repro: an elastic checkpoint of Adam OK."

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1, "elastic_checkpoint": True},
}


def main():
    deepspeed.init_distributed()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    engine.backward(engine(torch.ones(1, 1, device=engine.device)).sum())
    engine.step()
    with tempfile.TemporaryDirectory() as folder:
        try:
            engine.save_checkpoint(folder)
        except IndexError as error:
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
