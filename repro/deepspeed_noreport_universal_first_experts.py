"""With ep_size 2, every rank loads the first experts of a universal checkpoint instead of its own experts.

id: universal-first-experts
engine: deepspeed
symptom: after a universal checkpoint is loaded with ep_size 2, both ranks have the first expert
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 2
law: mesh.other_mesh
signature: is the first expert of the checkpoint
ok: repro: each rank loads its own experts OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_universal_first_experts.py

deepspeed.moe.layer.MoE names the experts of a rank from 0, so the second expert of two is deepspeed_experts.0 of the
second rank. A load with another ep_size looks up these names in the checkpoint and finds another expert.
save_checkpoint writes the weights of experts by their number in the model, but ds_to_universal takes the names from
each rank's optimizer.

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
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "is the first expert of the checkpoint"
OK = "repro: each rank loads its own experts OK."
CONFIG = {"zero_optimization": {"stage": 1}, "checkpoint": {"load_universal": True}, "train_batch_size": 2}


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


def build(ep_size, weight):
    """Build an engine whose experts have the weights ``weight``, ``weight`` + 1, and so on, by their number."""
    layer = MoE(2, nn.Linear(2, 2, bias=False), num_experts=2, ep_size=ep_size, min_capacity=0, drop_tokens=False)
    model, experts = nn.Sequential(layer), layer.deepspeed_moe.experts.deepspeed_experts
    for number, expert in enumerate(experts, torch.distributed.get_rank() if ep_size == 2 else 0):
        nn.init.constant_(expert.weight, weight + number)
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=0.0), config=CONFIG)[0], experts


def main():
    deepspeed.init_distributed()
    engine = build(ep_size=1, weight=1)[0]
    engine.backward(engine(torch.ones(2, 2, device=engine.device))[0].sum())
    engine.step()
    with save_and_convert(engine) as folder:
        engine, experts = build(ep_size=2, weight=10)
        engine.load_checkpoint(folder)
        torch.distributed.barrier()
    rank, value = torch.distributed.get_rank(), float(experts[0].weight[0, 0])
    if (rank, value) == (1, 1.0):
        print(f"repro: REPRODUCED: after the load the second expert {SIGNATURE}\n", end="", flush=True)
        return 1
    assert value == rank + 1, value
    torch.distributed.barrier()  # a rank with wrong experts leaves before this call
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
