"""DDP does not reduce the gradient of a gradient penalty if one parameter gets no gradient from it.

id: gradient-penalty-unreduced
engine: ddp
symptom: each rank silently keeps its own gradient of a penalty on the input's gradient
reported: documented limit, https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
affects: >=2.8.0
fixed: not yet
ranks: 2
law: double_backward.gradient_penalty
signature: the gradient of this rank alone, not reduced
ok: repro: a gradient penalty is reduced OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/ddp_noreport_gradient_penalty_unreduced.py

DDP's documentation says: "This module doesn't work with torch.autograd.grad()". So this is a documented limit, but
nothing warns the caller. The penalty does not depend on the last bias, so its backward never completes the bucket;
find_unused_parameters=True does not help.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SIGNATURE = "the gradient of this rank alone, not reduced"
OK = "repro: a gradient penalty is reduced OK."


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def penalty(model, x):
    """Return the squared gradient of the model's output with respect to the model's input."""
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope.square().sum()


def main():
    rank = start()
    assert dist.get_world_size() > 1, "one rank has nothing to reduce"
    model = nn.Linear(1, 1)
    nn.init.ones_(model.weight)
    inputs = [torch.ones(each + 1, 1, requires_grad=True) for each in range(dist.get_world_size())]
    alone = [torch.autograd.grad(penalty(model, x), model.weight)[0] for x in inputs]
    wanted = torch.stack(alone).mean(0)

    engine = DistributedDataParallel(model)
    penalty(engine, inputs[rank]).backward()
    got = model.weight.grad
    if torch.equal(got, alone[rank]):
        print(f"repro: REPRODUCED: {SIGNATURE}: got {got.item()}, expected {wanted.item()}\n", end="", flush=True)
        return 1
    torch.testing.assert_close(got, wanted)
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
