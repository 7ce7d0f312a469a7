"""FSDP1's optim_state_dict raises between forward and backward under SHARD_GRAD_OP.

id: fsdp1-state-between
engine: fsdp1
symptom: optim_state_dict between a forward and its backward raises a KeyError of a parameter, at stage 2
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 2
law: training.looked_at
signature: KeyError: Parameter containing
ok: repro: read the optimizer's state between forward and backward OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp1_noreport_state_between.py

Under SHARD_GRAD_OP weights stay unsharded from forward to backward. optim_state_dict looks up the unsharded parameter,
but the optimizer has its shard.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

OK = "repro: read the optimizer's state between forward and backward OK."
CPU = torch.device("cpu")  # the script shows the bug on gloo


def observe(_rank):
    model = FullyShardedDataParallel(
        nn.Linear(2, 2), use_orig_params=True, device_id=CPU, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP
    )
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    model(torch.ones(1, 2))
    try:
        FullyShardedDataParallel.optim_state_dict(model, optimizer)
    except KeyError as error:
        message = f"KeyError: {error}"
        if "KeyError: Parameter containing" not in message:
            raise
        return " ".join(message.split())
    return ""


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
