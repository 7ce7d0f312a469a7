"""If FSDP2 keeps weights unsharded after a forward, Fabric cannot save or load the model after an evaluation.

id: load-after-evaluation
engine: fabric_fsdp2
symptom: after an evaluation with reshard_after_forward=False, fabric.save raises "Could not find a distributed model"
reported: no report known
affects: >=2.6.6
fixed: not yet
ranks: 2
law: state.resume
signature: the model that has evaluated is not found
ok: repro: a model that has evaluated is saved and loaded OK.

Run it with nothing but torch and lightning-fabric installed:

    torchrun --standalone --nproc_per_node=2 repro/fabric_fsdp2_noreport_load_after_evaluation.py

ModelParallelStrategy looks for a module with a DTensor among its parameters (_has_dtensor_modules). With
reshard_after_forward=False, a forward without a backward leaves the unsharded weights, which are plain tensors. Until
the next backward, no parameter is a DTensor, unless tensor parallelism also splits some parameters.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

SIGNATURE = "the model that has evaluated is not found"
OK = "repro: a model that has evaluated is saved and loaded OK."


def shard(model, mesh):
    return fully_shard(model, mesh=mesh["data_parallel"], reshard_after_forward=False)


def find_refusals(fabric, model, folder):
    """Return the messages of save and load, each after an evaluation, if they do not find the model."""
    refusals = []
    fabric.save(folder / "before", {"model": model})
    with torch.no_grad():
        model(torch.ones(2, 4))
    for name, action in (
        ("save", lambda: fabric.save(folder / "after", {"model": model})),
        ("load", lambda: fabric.load(folder / "before", {"model": model})),
    ):
        try:
            action()
        except ValueError as error:
            if "Could not find a distributed model" not in str(error):
                raise
            refusals.append(f"{name} raised {error}")
    return refusals


def main():
    strategy = ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(nn.Linear(4, 4))
    answers = [None] * dist.get_world_size()
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        dist.all_gather_object(answers, find_refusals(fabric, model, Path(folders[0])))
    if fabric.global_rank == 0:
        found = [refusal for answer in answers for refusal in answer]
        if found:
            print(f"repro: REPRODUCED: {SIGNATURE}: {found[0]}\n", end="", flush=True)
        else:
            print(OK, flush=True)
    return int(any(answers))


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
