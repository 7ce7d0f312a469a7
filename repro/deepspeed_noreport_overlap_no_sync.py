"""With overlap_comm at stage 1, the backward after a no_sync block raises.

id: overlap-no-sync
engine: deepspeed
symptom: at stage 1 with overlap_comm the backward after no_sync raises "has already been reduced"
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 1
law: training.no_sync
signature: the backward after no_sync raises
ok: repro: with overlap_comm a backward after no_sync at stage 1 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_overlap_no_sync.py

With overlap_comm the hooks reduce each gradient at once, as at stages 2 and 3. The docstring of no_sync says that
no_sync is incompatible with stages 2 and 3.

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

SIGNATURE = "the backward after no_sync raises"
OK = "repro: with overlap_comm a backward after no_sync at stage 1 OK."
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
    for overlap in (False, True):
        engine = build(nn.Linear(2, 2), {"stage": 1, "overlap_comm": overlap})
        try:
            with engine.no_sync():
                engine.backward(engine(torch.ones(1, 2)).sum())
            engine.backward(engine(torch.ones(1, 2)).sum())
        except AssertionError as error:
            assert overlap
            wrong.append(" ".join(str(error).split()))
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
