"""torch.func.grad of an FSDP2 model raises if FSDP2 reshards to a smaller group of ranks.

id: torch-func-reshard-int
engine: fsdp2
symptom: torch.func.grad of a model with reshard_after_forward=2 calls Tensor.requires_grad_()
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 4
law: torch_func.grad
signature: Tensor.requires_grad_()
ok: repro: torch.func with reshard_after_forward OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=4 repro/fsdp2_noreport_torch_func_reshard_int.py

When FSDP2 reshards to the smaller group, it makes new parameters within the forward and calls requires_grad_() on them,
which a transform forbids. With reshard_after_forward=True the transform is right.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

OK = "repro: torch.func with reshard_after_forward OK."


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
    model = shard(reshard_after_forward=2)
    try:
        got = torch.func.grad(lambda x: model(x).sum())(torch.ones(1, 1))
    except RuntimeError as error:
        if "Tensor.requires_grad_()" not in str(error):
            raise
        return " ".join(str(error).split())
    return "" if got == 1 else f"gradient is {got}, expected 1"


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
