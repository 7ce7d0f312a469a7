"""fabric.load overwrites some of the weights before it raises for a damaged sharded checkpoint.

id: refused-shards-change-weights
engine: fabric_fsdp2
symptom: if one rank's file of a checkpoint is damaged, fabric.load raises after it has overwritten other ranks' weights
reported: no report known
affects: >=2.6.6
fixed: not yet
ranks: 2
law: state.refuse_damaged
signature: the load raised, and had changed the weights
ok: repro: a load that raises keeps the weights OK.

Run it with nothing but torch and lightning-fabric installed:

    torchrun --standalone --nproc_per_node=2 repro/fabric_fsdp2_noreport_load_changes_weights.py

ModelParallelStrategy passes the model's own tensors to torch.distributed.checkpoint, which reads into these tensors. A
rank whose file is intact already has the weights of the checkpoint when the error of the other rank arrives.

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
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import fully_shard

SIGNATURE = "the load raised, and had changed the weights"
OK = "repro: a load that raises keeps the weights OK."


def shard(model, mesh):
    return fully_shard(model, mesh=mesh["data_parallel"])


def main():
    strategy = ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(nn.Linear(4, 4))
    answers = [None] * dist.get_world_size()
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        folder = Path(folders[0]) / "saved"
        fabric.save(folder, {"model": model})
        dist.barrier()
        if fabric.global_rank == 0:
            file = folder / "__1_0.distcp"
            file.write_bytes(file.read_bytes()[:100])
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(1.0)
        before = [weight.to_local().detach().clone() for weight in model.parameters()]
        dist.barrier()
        try:
            fabric.load(folder, {"model": model})
        except CheckpointException as error:
            print(f"rank {fabric.global_rank}: {type(error).__name__}", file=sys.stderr, flush=True)
        else:
            raise RuntimeError("the damaged file was loaded")
        after = [weight.to_local() for weight in model.parameters()]
        is_unchanged = all(torch.equal(*pair) for pair in zip(before, after, strict=True))
        dist.all_gather_object(answers, is_unchanged)
    if fabric.global_rank == 0:
        if all(answers):
            print(OK, flush=True)
        else:
            changed = [rank for rank, answer in enumerate(answers) if not answer]
            print(f"repro: REPRODUCED: {SIGNATURE} on the ranks {changed}\n", end="", flush=True)
    return int(not all(answers))


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
