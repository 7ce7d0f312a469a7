"""If micro-batches do not divide a batch evenly, a pipeline stage gets a gradient of rows that nobody sent.

id: 126600
engine: torch_pp
symptom: if micro-batches do not divide the rows of a batch, the last stage ends with a gradient of other rows
reported: pytorch/pytorch#126600
affects: ==2.13.0
fixed: not yet
ranks: 2
law: pipeline.training
signature: the last stage has a gradient that is
ok: repro: uneven micro-batches OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/torch_pp_126600_uneven_micro_batches.py

A schedule cuts 7 rows into micro-batches of 2, 2, 2 and 1 (tensor_split in microbatch.py), and allocates the receive
buffers of a stage for the shape of the first micro-batch. The last message fills one row of two; the other row holds
old memory, and the loss broadcasts the one row of the target over both rows. The gradient for the previous stage has
two rows, and the first stage raises ("shape mismatch"). The last stage ends without an error, with a gradient that is
neither the mean over rows nor the mean over micro-batches. The issue asks to raise or to handle the buffers, and was
closed without either.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

SIGNATURE = "the last stage has a gradient that is"
OK = "repro: uneven micro-batches OK."
ROWS, MICRO_BATCHES = 7, 4


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def plain_gradients(layers: nn.Sequential, inputs: Tensor, target: Tensor) -> list[Tensor]:
    """Return two gradients of the last weight: of the mean over rows, and of the mean over micro-batches."""
    rows = torch.autograd.grad(loss(layers(inputs), target), layers[1].weight)[0]
    parts = zip(inputs.tensor_split(MICRO_BATCHES), target.tensor_split(MICRO_BATCHES), strict=True)
    losses = torch.stack([loss(layers(part), target_part) for part, target_part in parts])
    return [rows, torch.autograd.grad(losses.mean(), layers[1].weight)[0]]


def main() -> int:
    dist.init_process_group("gloo")
    rank, apart = dist.get_rank(), dist.new_group()  # a separate group for use after a failure
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    inputs, target = torch.randn(ROWS, 4), torch.randn(ROWS, 4)
    wanted = plain_gradients(layers, inputs, target)
    schedule = ScheduleGPipe(PipelineStage(layers[rank], rank, 2, torch.device("cpu")), MICRO_BATCHES, loss_fn=loss)
    raised = False
    try:
        schedule.step(*((inputs,) if rank == 0 else ()), **({"target": target, "losses": []} if rank else {}))
    except (RuntimeError, ValueError):  # an error on every rank would refuse the batch, as it should
        raised = True
    dist.barrier(apart)
    grad = layers[1].weight.grad
    # Rounding changes each mean by less than a hundredth of the distance between both means.
    apart_by = (wanted[0] - wanted[1]).norm()
    wrong = rank == 1 and not raised and min((grad - each).norm() for each in wanted) > apart_by / 100
    if wrong:
        print(f"repro: REPRODUCED: {SIGNATURE} no mean of rows or micro-batches\n", end="", flush=True)
    elif rank == 1:
        print(OK, flush=True)
    dist.barrier(apart)
    os._exit(int(wrong))  # messages of the first stage may be pending


if __name__ == "__main__":
    sys.exit(main())
