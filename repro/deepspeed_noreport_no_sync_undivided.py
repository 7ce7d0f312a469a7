"""DeepSpeed does not divide a loss inside no_sync by the number of micro-batches, but divides every other loss.

id: no-sync-undivided
engine: deepspeed
symptom: silent: with gradient_accumulation_steps 2, a micro-batch in no_sync counts twice
reported: no report known
affects: >=0.16.4,<=0.18.0
fixed: 0.18.8
broken: 0.16.4
ranks: 1
law: training.any_order
signature: the step used the sum and not the mean
ok: repro: a micro-batch in no_sync OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_no_sync_undivided.py

DeepSpeed divides every loss by gradient_accumulation_steps, except within no_sync: the engine assumes that the caller
accumulates there.

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

SIGNATURE = "the step used the sum and not the mean"
OK = "repro: a micro-batch in no_sync OK."

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}


def main():
    deepspeed.init_distributed()
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    with engine.no_sync():
        engine.backward(engine(torch.full((1, 1), 4.0, device=engine.device)).sum())
    engine.step()
    engine.backward(engine(torch.full((1, 1), 2.0, device=engine.device)).sum())
    engine.step()
    moved = -float(model.weight)
    if moved == 5:
        print(f"repro: REPRODUCED: {SIGNATURE}: {moved} = 4 + 2 / 2\n", end="", flush=True)
        return 1
    assert moved == 3, moved
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
