"""torch.func.grad of an FSDP2 model raises while gradients of a micro-batch wait for their reduction.

id: torch-func-unreduced
engine: fsdp2
symptom: torch.func.grad of a model with unreduced gradients reduces them and mutates a captured tensor
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 2
law: torch_func.grad
signature: would mutate a captured Tensor
ok: repro: torch.func with unreduced gradients OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp2_noreport_torch_func_unreduced.py

The backward within the transform computes no gradient of a weight. But it reduces the gradients that an earlier
backward under set_requires_gradient_sync(False) left behind, by in-place copies, which a transform forbids. On one rank
the transform ends, but the reduced gradient is a tensor of the transform without a storage, and the optimizer's step
fails on this tensor. torch.autograd.grad instead of torch.func.grad is right, and so is a transform without waiting
gradients.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

OK = "repro: torch.func with unreduced gradients OK."


def observe(_rank):
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    fully_shard(model)

    def total(x):
        return model(x).sum()

    assert torch.func.grad(total)(torch.ones(1, 1)) == 1, "without gradients that wait it is right"
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 1)).sum().backward()
    model.set_requires_gradient_sync(True)
    try:
        got = torch.func.grad(total)(torch.ones(1, 1))
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
