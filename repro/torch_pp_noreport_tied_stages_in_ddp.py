"""ScheduleZBVZeroBubble raises an internal error if two stages of a rank are in DDP and share a weight.

id: tied-stages-in-ddp
engine: torch_pp
symptom: ScheduleZBVZeroBubble raises an error of the prior iteration if two stages in DDP share a weight
reported: no report known
affects: ==2.13.0
fixed: not yet
ranks: 1
law: pipeline.training
signature: Expected to have finished reduction in the prior iteration
ok: repro: a schedule with tied stages in DDP OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/torch_pp_noreport_tied_stages_in_ddp.py

The last stage gets the gradients of its weights from autograd.grad, which calls no hook of DDP. The first stage has no
gradient of an input to compute. So its backward accumulates, and for the shared weight it calls the hooks of both
stages' DDP. The last stage's DDP then waits for the gradient of its bias, which never comes, and its forward of the
next micro-batch raises.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble
from torch.nn.parallel import DistributedDataParallel

SIGNATURE = "Expected to have finished reduction in the prior iteration"
OK = "repro: a schedule with tied stages in DDP OK."
MICRO_BATCHES = 2


def main() -> int:
    dist.init_process_group("gloo")
    parts = [nn.Linear(1, 1) for _ in range(2)]
    parts[1].weight = parts[0].weight
    stages = [
        PipelineStage(DistributedDataParallel(part), number, 2, torch.device("cpu"))
        for number, part in enumerate(parts)
    ]
    schedule = ScheduleZBVZeroBubble(stages, MICRO_BATCHES, loss_fn=lambda output, _: output.mean())
    inputs = torch.ones(MICRO_BATCHES, 1)
    try:
        schedule.step(inputs, target=inputs, losses=[])
    except RuntimeError as error:
        if SIGNATURE not in f"{error} {error.__cause__}":
            raise
        print(f"repro: REPRODUCED: {SIGNATURE}\n", end="", flush=True)
        return 1
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
