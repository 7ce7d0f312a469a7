"""DDP with a static graph never reduces gradients if the model returns a dataclass.

id: 106690
engine: ddp
symptom: with static_graph=True and outputs in a dataclass, each rank silently keeps its own gradients
reported: https://github.com/pytorch/pytorch/issues/106690
affects: >=2.8.0
fixed: not yet
ranks: 2
law: backward.outputs
signature: the gradient of this rank alone, not reduced
ok: repro: a dataclass as output, with a static graph OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/ddp_106690_static_dataclass_output.py

The failure is silent and happens in every iteration. An autograd function that the outputs pass through (_DDPSink)
starts the reduction of the first iteration. DDP finds the outputs by torch.utils._pytree, which treats a dataclass as
one opaque value. The report is about subclasses of dict. With a tuple, a list, a dictionary or a named tuple DDP is
right.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SIGNATURE = "the gradient of this rank alone, not reduced"
OK = "repro: a dataclass as output, with a static graph OK."


@dataclass
class Output:
    output: torch.Tensor


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)

    def forward(self, x):
        return Output(self.layer(x))


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
    model = Model()
    inputs = [torch.full((1, 1), each + 1.0) for each in range(dist.get_world_size())]
    alone = [torch.autograd.grad(model(x).output.sum(), model.layer.weight)[0] for x in inputs]
    wanted = torch.stack(alone).mean(0)

    engine = DistributedDataParallel(model, static_graph=True)
    for _ in range(2):
        engine.zero_grad()
        engine(inputs[rank]).output.sum().backward()
    got = model.layer.weight.grad
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
