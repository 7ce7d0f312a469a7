"""At stage 3, a load of a universal checkpoint changes weights and optimizer state before it raises.

id: universal-load-changes-state
engine: deepspeed
symptom: load_checkpoint of an incomplete universal checkpoint replaces part of the optimizer's state, then raises
reported: no report known
affects: >=0.16.4
fixed: not yet
ranks: 1
law: state.refuse_damaged
signature: the load that raised has changed
ok: repro: a load that raises changes nothing OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_universal_load_changes_state.py

load_hp_checkpoint_state_from_checkpoint_dir_stage3 reads one file after the other into the master weights and the
optimizer state. If the file of a second weight's momentum is missing, the master weights and the step count already
come from the checkpoint when the load raises. The momenta and the weights of the model are still those from before the
load.

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

SIGNATURE = "the load that raised has changed"
OK = "repro: a load that raises changes nothing OK."
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


def take_step(engine):
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()


def read_state(engine):
    """Return copies of the master weights and of the optimizer state."""
    (masters,) = engine.optimizer.fp32_partitioned_groups_flat
    return {"masters": masters.clone(), **{k: v.clone() for k, v in engine.optimizer.optimizer.state[masters].items()}}


def main():
    deepspeed.init_distributed()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    take_step(engine)
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder, tag="saved")
        convert(folder)
        take_step(engine)
        before = read_state(engine)
        Path(folder, "universal", "zero", "1.weight", "exp_avg.pt").unlink()
        try:
            engine.load_checkpoint(folder)
        except Exception as error:  # noqa: BLE001 - a training that continues without the checkpoint does the same
            print(f"the load raised {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        else:
            raise AssertionError("the load of a checkpoint without one of its files raised nothing")
    after = read_state(engine)
    changed = sorted(name for name, value in before.items() if not torch.equal(value, after[name]))
    if changed:
        print(f"repro: REPRODUCED: {SIGNATURE}: {changed}\n", end="", flush=True)
        return 1
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
