"""FSDP1 with HYBRID_SHARD does not reduce gradients over the replicas if a shard group has one rank.

id: hybrid-of-single-ranks
engine: fsdp1
symptom: with HYBRID_SHARD on one GPU per node, the weights of the ranks diverge
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 2
law: training.grads
signature: gradient is
ok: repro: gradients of single-rank shard groups OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp1_noreport_hybrid_of_single_ranks.py

A shard group of one rank turns the strategy into NO_SHARD, which reduces over that group only. FSDP1 still divides the
gradient by the whole world size. Reported downstream: https://github.com/verl-project/verl/issues/7493.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

OK = "repro: gradients of single-rank shard groups OK."
CPU = torch.device("cpu")  # the script shows the bug on gloo


def observe(rank):
    engine = FullyShardedDataParallel(
        nn.Linear(1, 1, bias=False),
        use_orig_params=True,
        device_id=CPU,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=init_device_mesh("cpu", (2, 1)),
    )
    engine(torch.full((1, 1), 1.0 + rank)).sum().backward()
    got = float(next(engine.parameters()).grad)
    return "" if got == 1.5 else f"gradient is {got:g} on rank {rank}, expected the mean 1.5"


def main():
    dist.init_process_group("gloo")
    problem = observe(dist.get_rank())
    if problem:
        print(f"repro: REPRODUCED: {problem}\n", end="", flush=True)
        return 1
    if dist.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
