"""FSDP2's reset_iter_state keeps the gradients of the backward that failed.

id: reset-keeps-gradients
engine: fsdp2
symptom: after a failed backward, reset_iter_state and zero_grad, the next gradient contains the failed backward's
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 1
law: backward.abort_and_retry
signature: the failed backward's gradient is in it
ok: repro: a failed backward is forgotten by reset_iter_state OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/fsdp2_noreport_reset_keeps_gradients.py

The documentation says: "The failed iteration's gradients are lost". But the gradients stay on the gathered parameters,
where zero_grad does not see them, and _reset_iter_state drops nothing there. Without reset_iter_state the next
iteration leaves every parameter without a gradient. 2.8.0 has no reset_iter_state (forward-after-exception).

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

SIGNATURE = "the failed backward's gradient is in it"
OK = "repro: a failed backward is forgotten by reset_iter_state OK."


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
        nn.init.ones_(self.first.weight)

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
    inputs = [torch.full((1, 1), each + 1.0) for each in range(dist.get_world_size())]
    wanted = torch.stack([torch.autograd.grad(model(x).sum(), model.last.weight)[0] for x in inputs]).mean(0)

    fully_shard(model)
    try:
        model(inputs[rank], breaks=True).sum().backward()
    except ArithmeticError:
        model.reset_iter_state()
        model.zero_grad()
    model(inputs[rank]).sum().backward()
    got = model.last.weight.grad.full_tensor()
    if torch.equal(got, 2 * wanted):
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
