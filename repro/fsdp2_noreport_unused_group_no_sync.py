"""FSDP2 raises in a backward without gradient sync if a group was never used and gradients have a reduce_dtype.

id: unused-group-no-sync
engine: fsdp2
symptom: a backward under set_requires_gradient_sync(False) raises AttributeError: no attribute '_unsharded_param'
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 2
law: parameters.any_order
signature: _unsharded_param
ok: repro: an unused group without sync OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp2_noreport_unused_group_no_sync.py

The end of a backward converts the gradients of every group to reduce_dtype. This includes a group that FSDP2 has not
gathered yet, which has no unsharded parameter. Without reduce_dtype, or with gradient sync, the backward is right.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

OK = "repro: an unused group without sync OK."


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(1, 1, bias=False)
        self.second = nn.Linear(1, 1, bias=False)
        for layer in (self.first, self.second):
            nn.init.ones_(layer.weight)

    def forward(self, x, both=True):
        return self.second(self.first(x)) if both else self.first(x)


def shard(**options):
    model = Layers()
    for module in (model.first, model.second, model):
        fully_shard(module, **options)
    return model


def observe(_rank):
    model = shard(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    model.set_requires_gradient_sync(False)
    try:
        model(torch.ones(1, 1), both=False).sum().backward()
    except AttributeError as error:
        if "_unsharded_param" not in str(error):
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
