"""load_checkpoint of a universal checkpoint does not restore the buffers of the module.

id: universal-buffers-lost
engine: deepspeed
symptom: buffers, such as running statistics, keep their initial values when a universal checkpoint is loaded
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 1
law: state.resume
signature: a buffer keeps its value from before the load
ok: repro: a universal checkpoint restores buffers OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_universal_buffers_lost.py

With load_universal DeepSpeed does not load the state of the module. Parameters come from the optimizer part, and
buffers from nowhere.

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

SIGNATURE = "a buffer keeps its value from before the load"
OK = "repro: a universal checkpoint restores buffers OK."
CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}


def build(model, **options):
    optimizer = torch.optim.AdamW(model.parameters())
    return deepspeed.initialize(model=model, optimizer=optimizer, config={**CONFIG, **options})[0]


def convert(source):
    """Convert a checkpoint with DeepSpeed's own command, and make it the one that load_checkpoint looks for."""
    arguments = ["--input_folder", f"{source}/saved", "--output_folder", f"{source}/universal"]
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *arguments, "--inject_missing_state"]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    Path(source, "latest_universal").write_text("universal")
    return run


class Counting(nn.Linear):
    """A linear layer that counts its forwards in a buffer."""

    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen += 1
        return super().forward(x)


def main():
    deepspeed.init_distributed()
    wrong = []
    model = Counting()
    engine = build(model)
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder, tag="saved")
        run = convert(folder)
        assert run.returncode == 0, run.stderr
        model = Counting()
        build(model, checkpoint={"load_universal": True}).load_checkpoint(folder)
    if model.seen.item() != 1:
        wrong.append(f"got {model.seen.item()}, expected 1")
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
