"""Ulysses cannot load a universal checkpoint, because its mpu reports no tensor-parallel world size.

id: universal-into-sequence-parts
engine: deepspeed
symptom: AttributeError: parallel_state_sp has no attribute 'get_tensor_model_parallel_world_size'
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 2
law: mesh.other_mesh
signature: has no attribute 'get_tensor_model_parallel_world_size'
ok: repro: sequence parallelism loads a universal checkpoint OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_universal_into_sequence_parts.py

At stages 1 and 2 load_hp_checkpoint_state_from_checkpoint_dir (runtime/base_optimizer.py) calls
mpu.get_tensor_model_parallel_world_size(), which DeepSpeed's own mpu of sequence parallelism does not have. It gets the
rank by bwc_tensor_model_parallel_rank, which falls back to get_model_parallel_rank. It does not call
bwc_tensor_model_parallel_world_size (utils/bwc.py), which has the same fallback for the number of ranks.

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

SIGNATURE = "has no attribute 'get_tensor_model_parallel_world_size'"
OK = "repro: sequence parallelism loads a universal checkpoint OK."
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


def build(weight, mpu=None):
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG, mpu=mpu)[0]


def main():
    deepspeed.init_distributed()
    engine = build(1.0)
    engine.backward(engine(torch.ones(1, 2, device=engine.device)).sum())
    engine.step()
    with save_and_convert(engine) as folder:
        engine.destroy()
        parallel_state_sp.initialize_sequence_parallel(2)
        engine = build(10.0, parallel_state_sp)
        try:
            engine.load_checkpoint(folder)
        except AttributeError as error:
            if SIGNATURE not in str(error):
                raise
            print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
            return 1
        torch.distributed.barrier()
    weight = engine.module.weight
    assert bool((weight == 1).all()), weight
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
