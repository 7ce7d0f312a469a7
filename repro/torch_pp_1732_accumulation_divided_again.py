"""A second batch of a pipeline divides the gradient of the first batch by the number of micro-batches again.

id: 1732
engine: torch_pp
symptom: gradients of several step() calls without zero_grad are a moving average instead of a sum
reported: https://github.com/pytorch/torchtitan/issues/1732
affects: ==2.13.0
fixed: not yet
ranks: 2
law: pipeline.windows
signature: the gradient of two batches
ok: repro: the gradient of two batches OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/torch_pp_1732_accumulation_divided_again.py

At the end of step() a stage divides the gradients of its parameters by the number of micro-batches
(_PipelineStageBase.scale_grads), including the gradients of earlier calls of step(). With scale_grads=False the caller
can divide.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

SIGNATURE = "the gradient of two batches"
OK = "repro: the gradient of two batches OK."
BATCHES, MICRO_BATCHES = 2, 2


def main() -> int:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    stage = nn.Linear(1, 1, bias=False)
    nn.init.ones_(stage.weight)
    schedule = ScheduleGPipe(
        PipelineStage(stage, rank, 2, torch.device("cpu")), MICRO_BATCHES, loss_fn=lambda output, _: output.mean()
    )
    inputs = torch.ones(MICRO_BATCHES, 1)
    for _ in range(BATCHES):
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=inputs, losses=[])
    got = stage.weight.grad.item()  # each batch has a mean gradient of 1
    if got != BATCHES:
        print(f"repro: REPRODUCED: {SIGNATURE} of mean 1 is {got}, not {BATCHES}\n", end="", flush=True)
        return 1
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
