"""FSDP1 with NO_SHARD loses parameters from model.parameters() if a backward does not reach them.

id: no-shard-parameters-vanish
engine: fsdp1
symptom: after training, model.parameters() lacks frozen weights, and a state dict cannot be made
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 2
law: state.consolidate
signature: of 2 parameters
ok: repro: parameters after a backward OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp1_noreport_no_shard_parameters_vanish.py

During forward and backward the parameters of a module are plain tensors, views of the FlatParameter. The hook that
turns them into parameters again runs after the FlatParameter has its own gradient. If there is no such gradient,
because the group is frozen or because the caller asked for another gradient, the end of backward should do that
(_catch_all_reshard). But _catch_all_reshard decides by an address whether the work is done, and NO_SHARD never changes
this address. FULL_SHARD and SHARD_GRAD_OP are right.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

OK = "repro: parameters after a backward OK."
CPU = torch.device("cpu")  # the script shows the bug on gloo


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2), requires_grad=False)
        self.layer = wrap(nn.Linear(2, 2, bias=False))

    def forward(self, x):
        return self.layer(x * self.gain)


def wrap(module):
    return FullyShardedDataParallel(
        module, use_orig_params=True, device_id=CPU, sharding_strategy=ShardingStrategy.NO_SHARD
    )


def observe(_rank):
    engine = wrap(Scaled())
    engine(torch.ones(1, 2)).sum().backward()
    count = len(list(engine.parameters()))
    return "" if count == 2 else f"{count} of 2 parameters are left after a backward"


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
