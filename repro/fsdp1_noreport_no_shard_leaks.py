"""FSDP1 with NO_SHARD never frees the memory of a model that has run a backward.

id: no-shard-leaks
engine: fsdp1
symptom: every model that was wrapped and trained stays in memory
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 2
law: resources.no_leak
signature: tensors stay
ok: repro: memory of dropped models OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp1_noreport_no_shard_leaks.py

On one rank every strategy becomes NO_SHARD. With FULL_SHARD on two ranks no tensors stay in memory.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import gc
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

OK = "repro: memory of dropped models OK."
CPU = torch.device("cpu")  # the script shows the bug on gloo


def train_and_drop():
    engine = FullyShardedDataParallel(
        nn.Linear(1, 1), use_orig_params=True, device_id=CPU, sharding_strategy=ShardingStrategy.NO_SHARD
    )
    engine(torch.ones(1, 1)).sum().backward()


def count_tensors():
    gc.collect()
    return sum(isinstance(found, torch.Tensor) for found in gc.get_objects())


def observe(_rank):
    train_and_drop()
    before = count_tensors()
    train_and_drop()
    left = count_tensors() - before
    return f"{left} tensors stay for each model" if left else ""


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
