"""FSDP1 raises if two reentrant checkpoints use a weight of the root module.

id: fsdp1-two-regions
engine: fsdp1
symptom: a weight that two reentrant checkpoints use has size 0 in the second recomputation
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 2
law: checkpointing.two_regions
signature: must match the size of tensor
ok: repro: a weight in two reentrant checkpoints OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp1_noreport_reentrant_two_regions.py

Each region runs a backward of its own within the backward. The end of the first region's backward frees the root's
weights. The recomputation of the other region does not gather them, because no forward of the root runs in it. With
NO_SHARD nothing is freed, but gradients are wrong: ranks report different gradients. Checkpoints that are not reentrant
are right.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.checkpoint import checkpoint

OK = "repro: a weight in two reentrant checkpoints OK."
CPU = torch.device("cpu")  # the script shows the bug on gloo


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = wrap(nn.Linear(2, 2))
        self.factor = nn.Parameter(torch.ones(1))

    def block(self, x):
        return self.layer(x) * self.factor

    def forward(self, x):
        once = checkpoint(self.block, x, use_reentrant=True)
        return checkpoint(self.block, once, use_reentrant=True)


def wrap(module):
    return FullyShardedDataParallel(module, use_orig_params=True, device_id=CPU)


def observe(_rank):
    engine = wrap(Twice())
    x = torch.ones(1, 2, requires_grad=True)
    try:
        engine(x).sum().backward()
    except RuntimeError as error:
        if "must match the size of tensor" not in str(error):
            raise
        return str(error)
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
