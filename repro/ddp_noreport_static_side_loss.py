"""DDP with a static graph does not reduce the gradients of a side loss that has its own backward.

id: static-side-loss
engine: ddp
symptom: with static_graph=True, a separate backward of a layer outside forward leaves each rank its own gradient
reported: no report known
affects: >=2.8.0
fixed: not yet
ranks: 2
law: backward.bypass
signature: the gradient of this rank alone, not reduced
ok: repro: a backward for a layer outside of forward, with a static graph OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/ddp_noreport_static_side_loss.py

The failure is silent and happens in every iteration. The documentation says that static_graph=True supports "model
parameters that are outside of forward function". Without static_graph=True the same training is right. The reduction of
the first iteration ends with the backward of DDP's outputs. DDP treats a parameter that has no gradient by then as
unused for the rest of the training.

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
OK = "repro: a backward for a layer outside of forward, with a static graph OK."


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(1, 1, bias=False)
        self.outside = nn.Linear(1, 1, bias=False)

    def forward(self, x):
        return self.inside(x)


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def main():
    rank = start()
    assert dist.get_world_size() > 1, "one rank has nothing to reduce"
    model = TwoLayers()
    inputs = [torch.full((1, 1), each + 1.0) for each in range(dist.get_world_size())]
    alone = [torch.autograd.grad(model.outside(x).sum(), model.outside.weight)[0] for x in inputs]
    wanted = torch.stack(alone).mean(0)

    engine = DistributedDataParallel(model, static_graph=True)
    for _ in range(2):
        engine.zero_grad()
        engine(inputs[rank]).sum().backward()
        engine.module.outside(inputs[rank]).sum().backward()
    got = model.outside.weight.grad
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
