"""DDP cannot continue training after an exception in a backward.

id: exception-in-backward
engine: ddp
symptom: after an exception in a backward, which the caller caught, the next forward raises
reported: no report known
affects: >=2.8.0
fixed: not yet
ranks: 1
law: backward.abort_and_retry
signature: Expected to have finished reduction in the prior iteration
ok: repro: training goes on after an exception within a backward OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/ddp_noreport_exception_in_backward.py

The reducer waits for the buckets of the failed backward, and no public function resets the reducer. The same happens
with an exception in a checkpoint's recomputation, and with find_unused_parameters=True. With static_graph=True and the
exception in the first iteration there is no error, and DDP reduces no gradient any more.

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

SIGNATURE = "Expected to have finished reduction in the prior iteration"
OK = "repro: training goes on after an exception within a backward OK."


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
        self.first = nn.Linear(1, 1, bias=False)
        self.last = nn.Linear(1, 1, bias=False)

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
    weights = list(model.parameters())
    inputs = [torch.full((1, 1), each + 1.0) for each in range(dist.get_world_size())]
    alone = [torch.autograd.grad(model(x).sum(), weights) for x in inputs]
    wanted = [torch.stack(same).mean(0) for same in zip(*alone, strict=True)]

    engine = DistributedDataParallel(model)
    try:
        engine(inputs[rank], breaks=True).sum().backward()
    except ArithmeticError:
        engine.zero_grad()
    try:
        engine(inputs[rank]).sum().backward()
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        line = str(error).splitlines()[0]
        print(f"repro: REPRODUCED: {line}\n", end="", flush=True)
        return 1
    torch.testing.assert_close([weight.grad for weight in weights], wanted)
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
