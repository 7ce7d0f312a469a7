"""At stages 1 and 2, a rank without a weight of a parameter group cannot load a universal checkpoint.

id: universal-small-group
engine: deepspeed
symptom: IndexError: list index out of range, on ranks whose partition of a small parameter group is empty
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 2
law: mesh.other_mesh
signature: list index out of range
ok: repro: every rank loads a group of one element OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_universal_small_group.py

load_hp_checkpoint_state_from_checkpoint_dir (runtime/base_optimizer.py) collects the step counts of the weights of
which this rank has a part, and reads steps[0] without a check that there are any. A group of one bias with one element
is on one rank alone.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import contextlib
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import torch
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))  # DeepSpeed's CPU accelerator asks for it

import deepspeed

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "list index out of range"
LOAD = "load_hp_checkpoint_state_from_checkpoint_dir"
OK = "repro: every rank loads a group of one element OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 1},
    "checkpoint": {"load_universal": True},
}


def convert(source):
    arguments = ["--input_folder", f"{source}/saved", "--output_folder", f"{source}/universal"]
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *arguments, "--inject_missing_state"]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    subprocess.run(command, capture_output=True, check=True, env=environment)
    Path(source, "latest_universal").write_text("universal")


@contextlib.contextmanager
def save_and_convert(engine):
    """Yield the folder of a converted checkpoint; each rank removes it, as an error on one rank stops the others."""
    folders = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(folders, src=0)
    try:
        engine.save_checkpoint(folders[0], tag="saved")
        if torch.distributed.get_rank() == 0:
            convert(folders[0])
        torch.distributed.barrier()
        yield folders[0]
    finally:
        shutil.rmtree(folders[0], ignore_errors=True)


def build(weight):
    """Build an engine with a model whose weights are all ``weight``."""
    model = nn.Linear(2, 1)
    for param in model.parameters():
        nn.init.constant_(param, weight)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}]
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=0.0), config=CONFIG)[0]


def main():
    deepspeed.init_distributed()
    engine = build(1.0)
    engine.backward(engine(torch.ones(1, 2, device=engine.device)).sum())
    engine.step()
    with save_and_convert(engine) as folder:
        engine.destroy()
        engine = build(10.0)
        try:
            engine.load_checkpoint(folder)
        except IndexError as error:
            if traceback.extract_tb(error.__traceback__)[-1].name != LOAD:
                raise
            print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
            return 1
        torch.distributed.barrier()
    for weight in engine.module.parameters():
        assert bool((weight == 1).all()), weight
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
