"""After an exception in a backward, the next forward of FSDP2 finds shards instead of gathered weights.

id: forward-after-exception
engine: fsdp2
symptom: after an exception in a backward, the next forward raises "got mixed torch.Tensor and DTensor"
reported: no report known
affects: ==2.8.0
fixed: 2.13.0
broken: 2.8.0
ranks: 1
law: backward.abort_and_retry
signature: got mixed torch.Tensor and DTensor
ok: repro: a forward after an exception within a backward OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/fsdp2_noreport_forward_after_exception.py

The layers that the failed backward had passed stay in the state of a backward, and in this state FSDP2 does not gather
weights for a forward. On 2.13 the forward is right, and its backward loses gradients (reset-keeps-gradients).

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

SIGNATURE = "got mixed torch.Tensor and DTensor"
OK = "repro: a forward after an exception within a backward OK."


class Breaks(torch.autograd.Function):
    """Return the input in forward; raise in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("on purpose")


class ThreeLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))

    def forward(self, x, breaks=False):
        first, middle, last = self.layers
        hidden = first(x)
        return last(middle(Breaks.apply(hidden) if breaks else hidden))


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def main():
    rank = start()
    model = ThreeLayers()
    x = torch.ones(1, 2)
    wanted = model(x).detach()

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    try:
        model(x, breaks=True).sum().backward()
    except ArithmeticError:
        model.zero_grad()
    try:
        got = model(x)
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    torch.testing.assert_close(got.detach(), wanted)
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
