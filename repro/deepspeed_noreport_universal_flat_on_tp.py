"""At stage 3, an engine with AutoTP cannot load a universal checkpoint of an engine without AutoTP.

id: universal-flat-on-tp
engine: deepspeed
symptom: RuntimeError: start (0) + length (8) exceeds dimension size (4), at stage 3 with AutoTP
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 2
law: mesh.other_mesh
signature: exceeds dimension size (
ok: repro: stage 3 loads a universal checkpoint with AutoTP OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_universal_flat_on_tp.py

If no ranks split weights, ds_to_universal writes the tensors of a stage-3 checkpoint flat, without a dictionary.
DeepSpeedZeroOptimizer_Stage3.load_hp_checkpoint_state takes this rank's tensor-parallel part only from a dictionary.
Without one, each rank copies its partition of the whole weight into a buffer that has room for a partition of its own
part.

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

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "exceeds dimension size ("
OK = "repro: stage 3 loads a universal checkpoint with AutoTP OK."
SPECS = [{"patterns": [r"^0\.weight$"], "partition_type": "row"}]
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
    "checkpoint": {"load_universal": True},
}
TENSOR_PARALLEL = {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": SPECS}}


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


def build(weight, **options):
    model = nn.Sequential(nn.Linear(4, 2, bias=False))
    nn.init.constant_(model[0].weight, weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    return deepspeed.initialize(model=model, optimizer=optimizer, config={**CONFIG, **options})[0]


def main():
    deepspeed.init_distributed()
    engine = build(1.0)
    engine.backward(engine(torch.ones(1, 4, device=engine.device)).sum())
    engine.step()
    with save_and_convert(engine) as folder:
        engine.destroy()
        engine = build(10.0, tensor_parallel=TENSOR_PARALLEL)
        try:
            engine.load_checkpoint(folder)
        except RuntimeError as error:
            if SIGNATURE not in str(error):
                raise
            print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
            return 1
        torch.distributed.barrier()
    (weight,) = engine.module.parameters()
    with deepspeed.zero.GatheredParameters([weight]):
        assert weight.numel() == 4, weight
        assert bool((weight == 1).all()), weight
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
