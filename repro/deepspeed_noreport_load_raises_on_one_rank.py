"""load_checkpoint raises only on the rank whose file is missing or damaged, and the other ranks continue training.

id: load-raises-on-one-rank
engine: deepspeed
symptom: if one rank's file of a checkpoint is damaged, load_checkpoint raises on that rank alone
reported: no report known
affects: >=0.16.4
fixed: not yet
ranks: 2
law: state.refuse_damaged
signature: the ranks continue from different checkpoints
ok: repro: every rank falls back to the older checkpoint OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_load_raises_on_one_rank.py

The script trains as a job does that falls back to an older checkpoint if the newest one cannot be loaded. Each rank
reads its own optimizer states, and load_checkpoint of deepspeed.runtime.engine does not tell the other ranks that a
read failed. So the rank with the damaged file falls back, and the other rank continues from the newest checkpoint.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import importlib
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))  # DeepSpeed's CPU accelerator asks for it

import deepspeed

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "the ranks continue from different checkpoints"
OK = "repro: every rank falls back to the older checkpoint OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}


def train_and_save(engine, folder, tag, device):
    engine.backward(engine(torch.ones(1, 4, device=device)).sum())
    engine.step()
    engine.save_checkpoint(folder, tag=tag)


def load_newest(engine, folder):
    """Load the newest checkpoint that can be loaded, and return its tag."""
    for tag in ("second", "first"):
        try:
            engine.load_checkpoint(folder, tag=tag)
        except Exception as error:  # noqa: BLE001 - a job that falls back to an older checkpoint does the same
            print(f"rank {dist.get_rank()}: {tag}: {type(error).__name__}", file=sys.stderr, flush=True)
        else:
            return tag
    raise RuntimeError("no checkpoint can be loaded")


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        for tag in ("first", "second"):
            train_and_save(engine, folders[0], tag, device)
        dist.barrier()
        if dist.get_rank() == 0:
            damaged = Path(folders[0], "second", "zero_pp_rank_1_mp_rank_00_optim_states.pt")
            damaged.write_bytes(damaged.read_bytes()[:100])
        dist.barrier()
        tags = [None] * dist.get_world_size()
        dist.all_gather_object(tags, load_newest(engine, folders[0]))
    if dist.get_rank() == 0:
        if len(set(tags)) > 1:
            print(f"repro: REPRODUCED: {SIGNATURE}: {tags}\n", end="", flush=True)
        else:
            print(OK, flush=True)
    dist.destroy_process_group()
    sys.exit(int(len(set(tags)) > 1))


if __name__ == "__main__":
    main()
