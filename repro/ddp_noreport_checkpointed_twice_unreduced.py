"""DDP reduces only a part of the gradient of a layer that is in two reentrant checkpoints.

id: checkpointed-twice-unreduced
engine: ddp
symptom: DDP silently reduces only a part of the gradient of a layer in two reentrant checkpoints of one loss
reported: documented limit, https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
affects: >=2.8.0
fixed: not yet
ranks: 2
law: checkpointing.two_regions
signature: one region reduced, the other this rank's alone
ok: repro: a layer in two reentrant checkpoints OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/ddp_noreport_checkpointed_twice_unreduced.py

DDP's documentation says: "We currently do not support the case where a layer is checkpointed multiple times". So this
is a documented limit, but nothing warns the caller. Each checkpointed region runs a backward of its own, and the bucket
is full after the first one. If DDP still waits for another parameter, DDP raises "Expected to mark a variable ready
only once". With static_graph=True, or with checkpoints that are not reentrant, the gradient is right. pytorch#109191 is
similar.

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
from torch.utils.checkpoint import checkpoint

SIGNATURE = "one region reduced, the other this rank's alone"
OK = "repro: a layer in two reentrant checkpoints OK."


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.layer.weight, 2.0)

    def forward(self, x):
        once = checkpoint(self.layer, x, use_reentrant=True)
        return checkpoint(self.layer, once, use_reentrant=True)


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def gradient(call, layer, x):
    layer.zero_grad()
    call(x).sum().backward()
    return layer.weight.grad


def main():
    rank = start()
    assert dist.get_world_size() > 1, "one rank has nothing to reduce"
    model = Twice()
    inputs = [torch.full((1, 1), each + 1.0, requires_grad=True) for each in range(dist.get_world_size())]
    alone = [gradient(model, model.layer, x) for x in inputs]  # 2 x for each region
    wanted = torch.stack(alone).mean(0)

    engine = DistributedDataParallel(model)
    got = gradient(engine, model.layer, inputs[rank])
    if torch.equal(got, wanted / 2 + alone[rank] / 2):
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
