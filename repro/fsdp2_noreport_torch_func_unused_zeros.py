"""torch.func.grad of an FSDP2 model raises with set_reduce_scatter_unused_params.

id: torch-func-unused-zeros
engine: fsdp2
symptom: torch.func.grad of a model with reduce_scatter_unused_params mutates a captured tensor
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 2
law: torch_func.grad
signature: would mutate a captured Tensor
ok: repro: torch.func with unused parameters OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp2_noreport_torch_func_unused_zeros.py

FSDP2 reduces the zeros of unused parameters by in-place copies within the backward, which a transform forbids. Without
the option torch.func.grad with respect to the input is right.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

OK = "repro: torch.func with unused parameters OK."


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
    model = shard()
    for module in (model.first, model.second, model):
        module.set_reduce_scatter_unused_params(True)
    try:
        got = torch.func.grad(lambda x: model(x, both=False).sum())(torch.ones(1, 1))
    except RuntimeError as error:
        if "would mutate a captured Tensor" not in str(error):
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
