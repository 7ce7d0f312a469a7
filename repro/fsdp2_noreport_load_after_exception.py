"""After an exception in a backward and a load, the next forward of FSDP2 uses weights from before the load.

id: load-after-exception
engine: fsdp2
symptom: after an exception in a backward, and a load, the next forward uses the weights from before the load
reported: no report known
affects: ==2.13.0
fixed: not yet
ranks: 2
law: training.any_order
signature: of weights from before the load
ok: repro: a forward after an exception and a load OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp2_noreport_load_after_exception.py

While a backward is in one layer, FSDP2 gathers the weights of the preceding layer. If the backward ends by an
exception, the gathered weights of a layer that the backward did not reach wait for the next forward. The next forward
uses them without a check that they are current.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

SIGNATURE = "of weights from before the load"
OK = "repro: a forward after an exception and a load OK."


class Breaks(torch.autograd.Function):
    """Return the input in forward; raise in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("on purpose")


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = (nn.Linear(2, 2, bias=False) for _ in range(2))

    def forward(self, x, breaks=False):
        hidden = self.first(x)
        return self.last(Breaks.apply(hidden) if breaks else hidden)


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def main():
    rank = start()
    model = TwoLayers()
    x = torch.ones(1, 2)
    for layer in (model.first, model.last, model):
        fully_shard(layer)
    model(x).sum().backward()  # the first forward records the order of the gathers
    model.zero_grad()
    ones = {name: torch.ones_like(tensor) for name, tensor in get_model_state_dict(model).items()}
    try:
        model(x, breaks=True).sum().backward()
        raise AssertionError("the backward was to raise")
    except ArithmeticError:
        model.zero_grad()
    set_model_state_dict(model, ones)
    # With weights of ones, each layer doubles its input.
    got, wanted = model(x).detach(), torch.full((1, 2), 4.0)
    if not torch.equal(got, wanted):
        print(f"repro: REPRODUCED: {got.tolist()} is {SIGNATURE}, expected {wanted.tolist()}\n", end="", flush=True)
        return 1
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
