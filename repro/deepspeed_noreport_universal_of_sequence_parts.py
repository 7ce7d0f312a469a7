"""ds_to_universal refuses a checkpoint of Ulysses because it treats sequence ranks as tensor-parallel ranks.

id: universal-of-sequence-parts
engine: deepspeed
symptom: RuntimeError: Checkpoint model-state file count 1 does not match pp_degree=1 * tp_degree=2
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 2
law: mesh.other_mesh
signature: does not match pp_degree=1 * tp_degree=2
ok: repro: a checkpoint of sequence parallelism is converted OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_universal_of_sequence_parts.py

DeepSpeed's mpu of sequence parallelism (runtime/sequence_parallel/parallel_state_sp.py) reports its ranks as those of
model parallelism: "we can just alias MP with SP". So a checkpoint at stages 1 and 2 records a tp_degree of 2, although
every rank has all weights, and DeepSpeed saves one file of them.

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
from deepspeed.runtime.sequence_parallel import parallel_state_sp

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "does not match pp_degree=1 * tp_degree=2"
OK = "repro: a checkpoint of sequence parallelism is converted OK."
CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}


def convert(source):
    """Convert a checkpoint with DeepSpeed's own command, and make it the one that load_checkpoint looks for."""
    arguments = ["--input_folder", f"{source}/saved", "--output_folder", f"{source}/universal"]
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *arguments, "--inject_missing_state"]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    run = subprocess.run(command, capture_output=True, check=False, env=environment, text=True)
    Path(source, "latest_universal").write_text("universal")
    return run.returncode, run.stderr


def main():
    deepspeed.init_distributed()
    parallel_state_sp.initialize_sequence_parallel(2)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG, mpu=parallel_state_sp)[0]
    engine.backward(engine(torch.ones(1, 2, device=engine.device)).sum())
    engine.step()
    with tempfile.TemporaryDirectory() as own_folder:
        folders = [own_folder]
        torch.distributed.broadcast_object_list(folders, src=0)
        engine.save_checkpoint(folders[0], tag="saved")
        torch.distributed.barrier()
        if torch.distributed.get_rank():
            return 0
        status, errors = convert(folders[0])
    if status:
        last = errors.strip().splitlines()[-1]
        assert SIGNATURE in last, errors
        print(f"repro: REPRODUCED: {last}\n", end="", flush=True)
        return 1
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
