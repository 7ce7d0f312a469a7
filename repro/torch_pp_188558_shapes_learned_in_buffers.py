"""The forward by which a pipeline schedule learns shapes changes running statistics.

id: 188558
engine: torch_pp
symptom: the first step() of a schedule silently counts one more batch in the running statistics of each stage
reported: https://github.com/pytorch/pytorch/pull/188558
affects: ==2.13.0
fixed: not yet
ranks: 1
law: pipeline.buffers
signature: one more batch was counted
ok: repro: running statistics of a stage OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/torch_pp_188558_shapes_learned_in_buffers.py

Before its first micro-batch a schedule runs a forward of each stage, in training mode, to learn the shapes of the
tensors that the stage sends (_forward_metadata_inference in stage.py). On the first stage the input of this forward is
the first micro-batch. On every later stage the input is uninitialized memory (torch.empty), and batch norm adds it to
its running mean and variance. The report restores buffers around that forward.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

SIGNATURE = "one more batch was counted"
OK = "repro: running statistics of a stage OK."
MICRO_BATCHES = 4


def main() -> int:
    dist.init_process_group("gloo")
    part = nn.BatchNorm1d(1)
    stage = PipelineStage(part, 0, 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=lambda output, _: output.sum())
    inputs = torch.ones(2 * MICRO_BATCHES, 1)
    schedule.step(inputs, target=inputs, losses=[])
    count = int(part.num_batches_tracked)
    dist.destroy_process_group()
    if count == MICRO_BATCHES + 1:
        print(f"repro: REPRODUCED: {SIGNATURE}: expected {MICRO_BATCHES}, got {count}\n", end="", flush=True)
        return 1
    assert count == MICRO_BATCHES, count
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
