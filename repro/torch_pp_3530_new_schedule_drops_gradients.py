"""The first step() of a new schedule drops accumulated gradients of fully_shard parameters.

id: 3530
engine: torch_pp
symptom: with stages in fully_shard, the first step() of a new schedule silently sets accumulated gradients to None
reported: https://github.com/NVIDIA-NeMo/Automodel/pull/3530
affects: ==2.13.0
fixed: not yet
ranks: 1
law: pipeline.any_order
signature: gradients of the schedule before were dropped
ok: repro: gradients of two schedules add up OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/torch_pp_3530_new_schedule_drops_gradients.py

A schedule is built for one loss and one number of micro-batches, so a batch with another loss or number needs a new
schedule around the same modules. The first step of a schedule runs a forward and a backward to learn shapes, and then
sets every gradient of modules in fully_shard to None (_post_metadata_inference_cleanup in stage.py). This drops the
gradients that it has just made, and also those of earlier batches that wait for the optimizer's step. Stages without
fully_shard keep them. The script was run on torch 2.13.0 alone; the report says that 2.12.0 was the first release with
this cleanup.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

SIGNATURE = "gradients of the schedule before were dropped"
OK = "repro: gradients of two schedules add up OK."


def main() -> int:
    dist.init_process_group("gloo")
    part = nn.Linear(1, 1, bias=False)
    fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
    inputs = torch.ones(1, 1)
    # The gradient of the first loss is 1, and that of the second loss is 2.
    for factor in (1.0, 2.0):
        stage = PipelineStage(part, 0, 1, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, 1, loss_fn=lambda output, _, factor=factor: factor * output.sum())
        schedule.step(inputs, target=inputs, losses=[])
    gradient = part.weight.grad.full_tensor().item()
    dist.destroy_process_group()
    if gradient == 2.0:
        print(f"repro: REPRODUCED: {SIGNATURE}: expected 3, got {gradient:g}\n", end="", flush=True)
        return 1
    assert gradient == 3.0, gradient
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
