"""After a load of a universal checkpoint at stage 3, all sub-groups share one step count, and each one increments it.

id: universal-shared-step
engine: deepspeed
symptom: after a universal checkpoint is loaded at stage 3, torch's Adam corrects its bias with wrong step counts
reported: no report known
affects: >=0.18.8
fixed: not yet
ranks: 1
law: access.after_change
signature: the sub-groups counted different steps
ok: repro: every sub-group counts its own steps OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_universal_shared_step.py

load_hp_checkpoint_state_from_checkpoint_dir_stage3 gives the state of every sub-group the same tensor "step".
torch.optim.Adam adds 1 to this tensor in place, once for each sub-group. The small sub_group_size here stands for a
model of more than 10**9 weights.

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

SIGNATURE = "the sub-groups counted different steps"
OK = "repro: every sub-group counts its own steps OK."
CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "sub_group_size": 1}}


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


def take_step(engine):
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()


def main():
    deepspeed.init_distributed()
    engine = build(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    take_step(engine)
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder, tag="saved")
        run = convert(folder)
        assert run.returncode == 0, run.stderr
        loaded = build(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), checkpoint={"load_universal": True})
        loaded.load_checkpoint(folder)
    for trained in (engine, loaded):
        take_step(trained)
    never_saved, restored = (
        [int(state["step"]) for state in trained.optimizer.optimizer.state.values()] for trained in (engine, loaded)
    )
    weights = [trained.optimizer.fp32_partitioned_groups_flat for trained in (engine, loaded)]
    if restored != never_saved or any(not torch.equal(*pair) for pair in zip(*weights, strict=True)):
        print(f"repro: REPRODUCED: {SIGNATURE}: {restored}, expected {never_saved}\n", end="", flush=True)
        return 1
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
