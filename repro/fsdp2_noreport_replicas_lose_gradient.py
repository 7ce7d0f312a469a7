"""FSDP2 loses gradients that wait for the all-reduce over replicas if the last micro-batch does not use their layer.

id: replicas-lose-gradient
engine: fsdp2
symptom: with set_requires_all_reduce(False) a layer that the last micro-batch skips has no gradient
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 2
law: parameters.any_order
signature: gradient is
ok: repro: gradients of an earlier micro-batch OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp2_noreport_replicas_lose_gradient.py

The all-reduce is part of a group's own backward. A group that the last micro-batch of an accumulation window does not
use keeps its earlier gradients in a private attribute, reduced over its shards only, and the optimizer does not see
them.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

OK = "repro: gradients of an earlier micro-batch OK."


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
    model = shard(mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    model.set_requires_all_reduce(False)
    model(torch.ones(1, 1)).sum().backward()
    model.set_requires_all_reduce(True)
    model(torch.ones(1, 1), both=False).sum().backward()
    got = model.second.weight.grad
    return "" if got is not None and float(got.full_tensor()) == 1 else f"gradient is {got}, expected 1"


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
