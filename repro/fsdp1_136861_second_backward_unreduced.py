"""FSDP1 with NO_SHARD does not reduce the second of two backwards after two forwards.

id: 136861
engine: fsdp1
symptom: after two forwards, the gradients of the second backward are not reduced
reported: https://github.com/pytorch/pytorch/issues/136861
affects: >=2.13.0
fixed: not yet
ranks: 2
law: training.several_backwards
signature: gradient is
ok: repro: two backwards after two forwards OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp1_136861_second_backward_unreduced.py

FSDP1 registers the hook that reduces once for both forwards, and removes this hook at the end of the first backward.
With FULL_SHARD the second backward raises instead, because FSDP1 has freed the weights; the issue reports this error.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

OK = "repro: two backwards after two forwards OK."
CPU = torch.device("cpu")  # the script shows the bug on gloo


def observe(rank):
    engine = FullyShardedDataParallel(
        nn.Linear(1, 1, bias=False),
        use_orig_params=True,
        device_id=CPU,
        sharding_strategy=ShardingStrategy.NO_SHARD,
    )
    losses = [engine(torch.full((1, 1), 1.0 + rank)).sum() for _ in range(2)]
    for loss in losses:
        loss.backward()
    got = float(next(engine.parameters()).grad)
    return "" if got == 3 else f"gradient is {got:g} on rank {rank}, expected twice the mean, 3"


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
