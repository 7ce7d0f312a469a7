"""ds_to_universal raises for a checkpoint of any optimizer but Adam.

id: universal-other-optimizer
engine: deepspeed
symptom: ds_to_universal raises KeyError: 'exp_avg' for a checkpoint of SGD with momentum
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 1
law: state.resume
signature: ds_to_universal raises KeyError: 'exp_avg'
ok: repro: ds_to_universal converts a checkpoint of SGD with momentum OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_universal_other_optimizer.py

ds_to_universal reads Adam's two moments of every parameter by their names.

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

SIGNATURE = "ds_to_universal raises KeyError: 'exp_avg'"
OK = "repro: ds_to_universal converts a checkpoint of SGD with momentum OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
}


def build(model, zero, optimizer=None, **options):
    config = {**CONFIG, **options, "zero_optimization": zero}
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def convert(source):
    """Convert a checkpoint with DeepSpeed's own command, and make it the one that load_checkpoint looks for."""
    arguments = ["--input_folder", f"{source}/saved", "--output_folder", f"{source}/universal"]
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *arguments, "--inject_missing_state"]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    Path(source, "latest_universal").write_text("universal")
    return run


def main():
    deepspeed.init_distributed()
    wrong = []
    model = nn.Linear(2, 2)
    engine = build(model, {"stage": 1}, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5))
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder, tag="saved")
        run = convert(folder)
    if run.returncode:
        wrong.append(run.stderr.strip().splitlines()[-1])
        assert "KeyError: 'exp_avg'" in run.stderr, run.stderr
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
