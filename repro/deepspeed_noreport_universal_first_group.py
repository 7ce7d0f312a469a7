"""At stage 3, a load of a universal checkpoint gives every parameter group the options of the first group.

id: universal-first-group
engine: deepspeed
symptom: after a universal checkpoint is loaded at stage 3, biases decay like the weights of the first parameter group
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 1
law: mesh.other_mesh
signature: the options of the first group
ok: repro: each parameter group keeps its options OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_universal_first_group.py

load_hp_checkpoint_state_from_checkpoint_dir_stage3 copies the entries of the checkpoint's first parameter group into
every group: "Generally, the hyperparameters of each parameter should be the same, we can obtain from any parameter". In
the checkpoint the second group has no weight decay and its own learning rate; after the load it has the weight decay
and the learning rate of the first group. Stages 1 and 2 load each group's own options.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))  # DeepSpeed's CPU accelerator asks for it

import deepspeed

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "the options of the first group"
OK = "repro: each parameter group keeps its options OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
    "checkpoint": {"load_universal": True},
}


def convert(source):
    """Convert a checkpoint with DeepSpeed's own command, and make it the one that load_checkpoint looks for."""
    arguments = ["--input_folder", f"{source}/saved", "--output_folder", f"{source}/universal"]
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *arguments, "--inject_missing_state"]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    subprocess.run(command, capture_output=True, check=True, env=environment)
    Path(source, "latest_universal").write_text("universal")


def read_options(engine):
    return [(group["lr"], group["weight_decay"]) for group in engine.optimizer.optimizer.param_groups]


def build(*options):
    """Build an engine whose two parameter groups have the ``options``, each a learning rate and a weight decay."""
    model = nn.Linear(2, 2)
    groups = [
        {"params": [param], "lr": rate, "weight_decay": decay}
        for param, (rate, decay) in zip(model.parameters(), options, strict=True)
    ]
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups), config=CONFIG)[0]


def main():
    deepspeed.init_distributed()
    engine = build((0.125, 0.5), (0.25, 0.0))
    engine.backward(engine(torch.ones(1, 2, device=engine.device)).sum())
    engine.step()
    before = read_options(engine)
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder, tag="saved")
        convert(folder)
        engine.destroy()
        engine = build((1.0, 0.75), (2.0, 0.625))
        engine.load_checkpoint(folder)
    after = read_options(engine)
    if after == [before[0]] * 2:
        found = f"the second group has (lr, weight decay) {after[1]} after the load, {SIGNATURE}; expected {before[1]}"
        print(f"repro: REPRODUCED: {found}\n", end="", flush=True)
        return 1
    assert after == before, after
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
