"""A zero-bubble schedule trains no weight of the stage after a frozen first stage.

id: zero-bubble-after-frozen-stage
engine: torch_pp
symptom: with a zero-bubble schedule, the stage after a frozen first stage silently gets no gradients
reported: no report known
affects: ==2.13.0
fixed: not yet
ranks: 1
law: pipeline.frozen
signature: the stage after a frozen one has no gradient
ok: repro: the stage after a frozen one OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/torch_pp_noreport_zero_bubble_after_frozen_stage.py

Schedules that split the backward compute the gradients of a stage's weights from the values that they kept when they
computed the gradients of the stage's inputs (stage_backward_input). Inputs without a gradient keep nothing, so the
weights get no gradient. torch excludes the first stage from this split ("if inputs does not require gradient, then the
parameter group will not be fully captured", backward_weight_one_chunk in stage.py). But if all weights of the first
stage are frozen, the inputs of the next stage need no gradient either. GPipe and 1F1B are right.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble

OK = "repro: the stage after a frozen one OK."
MICRO_BATCHES = 2


def main() -> int:
    dist.init_process_group("gloo")
    frozen, trained = (nn.Linear(1, 1) for _ in range(2))
    frozen.requires_grad_(False)
    stages = [PipelineStage(part, number, 2, torch.device("cpu")) for number, part in enumerate((frozen, trained))]
    schedule = ScheduleZBVZeroBubble(stages, MICRO_BATCHES, loss_fn=lambda output, _: output.mean())
    inputs = torch.ones(MICRO_BATCHES, 1)
    schedule.step(inputs, target=inputs, losses=[])
    missing = [name for name, parameter in trained.named_parameters() if parameter.grad is None]
    dist.destroy_process_group()
    if missing:
        print(f"repro: REPRODUCED: the stage after a frozen one has no gradient of {missing}\n", end="", flush=True)
        return 1
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
