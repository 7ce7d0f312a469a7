"""ds_to_universal raises for a checkpoint of ZeRO stage 3 with several sub-groups.

id: 7585
engine: deepspeed
symptom: with a small sub_group_size, ds_to_universal raises "start + length exceeds dimension size"
reported: https://github.com/deepspeedai/DeepSpeed/issues/7584
affects: ==0.17.6
fixed: 0.18.0
broken: 0.17.6
ranks: 1
law: state.resume
signature: exceeds dimension size
ok: repro: a universal checkpoint of several sub-groups OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_7585_universal_sub_groups.py

ds_to_universal looks for all weights in the flat buffer of the first sub-group.

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

SIGNATURE = "exceeds dimension size"
OK = "repro: a universal checkpoint of several sub-groups OK."

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    # Without this threshold, every rank keeps all weights of so small a model unsharded.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 20},
}


def build(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    return deepspeed.initialize(model=model, optimizer=optimizer, config={**CONFIG, **options})[0]


def convert(source):
    """Convert a checkpoint with DeepSpeed's own command, and make the result the one that load_checkpoint looks for."""
    arguments = ["--input_folder", f"{source}/saved", "--output_folder", f"{source}/universal"]
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *arguments, "--inject_missing_state"]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    Path(source, "latest_universal").write_text("universal")
    return run


def main():
    deepspeed.init_distributed()
    engine = build()
    engine.backward(engine(torch.ones(1, 4, device=engine.device)).sum())
    engine.step()
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder, tag="saved")
        run = convert(folder)
    if run.returncode and SIGNATURE in run.stderr:
        print(f"repro: REPRODUCED: {run.stderr.strip().splitlines()[-1]}\n", end="", flush=True)
        return 1
    assert run.returncode == 0, run.stderr
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
