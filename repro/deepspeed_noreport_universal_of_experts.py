"""ds_to_universal cannot convert a checkpoint of a native MoE whose experts are split over ranks.

id: universal-of-experts
engine: deepspeed
symptom: ds_to_universal raises RuntimeError: shape '[2, 2]' is invalid for input of size 8
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 2
law: mesh.other_mesh
signature: is invalid for input of size
ok: repro: a checkpoint of split experts is converted OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_universal_of_experts.py

Each rank has an expert named deepspeed_experts.0, and its own partition of this expert. Because the partitions of all
ranks have one name, ds_to_universal treats them as partitions of one weight. For such a checkpoint ds_to_universal
prints "assuming native DeepSpeed MoE and skipping AutoEP consolidation", so it recognizes the experts.

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
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "is invalid for input of size"
OK = "repro: a checkpoint of split experts is converted OK."
CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}


def convert(source):
    """Convert a checkpoint with DeepSpeed's own command, and make it the one that load_checkpoint looks for."""
    arguments = ["--input_folder", f"{source}/saved", "--output_folder", f"{source}/universal"]
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *arguments, "--inject_missing_state"]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    run = subprocess.run(command, capture_output=True, check=False, env=environment, text=True)
    Path(source, "latest_universal").write_text("universal")
    return run.returncode, run.stderr


class Tokens(nn.Module):
    """A layer of two experts, one on each rank."""

    def __init__(self):
        super().__init__()
        self.moe = MoE(2, nn.Linear(2, 2, bias=False), num_experts=2, ep_size=2, min_capacity=0, drop_tokens=False)

    def forward(self, tokens):
        return self.moe(tokens)[0]


def main():
    deepspeed.init_distributed()
    model = Tokens()
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups), config=CONFIG)[0]
    engine.backward(engine(torch.ones(2, 2, device=engine.device)).sum())
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
