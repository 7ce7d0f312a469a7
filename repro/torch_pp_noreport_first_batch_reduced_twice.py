"""DDP reduces the gradients of a pipeline stage twice in the first batch.

id: first-batch-reduced-twice
engine: torch_pp
symptom: in the first step() of a schedule, stages in DDP also all-reduce after the first micro-batch
reported: no report known
affects: ==2.13.0
fixed: not yet
ranks: 4
law: pipeline.wire
signature: all-reduces of gradients in the first batch
ok: repro: one all-reduce of gradients in each batch OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=4 repro/torch_pp_noreport_first_batch_reduced_twice.py

A stage runs the forwards and backwards of micro-batches in no_sync(), except the last backward. The forward that learns
shapes in the first batch does not run in no_sync(). It prepares DDP's reducer, so the next backward, that of the first
micro-batch, reduces gradients. The final gradients are right, but DDP sends twice as many.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

SIGNATURE = "all-reduces of gradients in the first batch"
OK = "repro: one all-reduce of gradients in each batch OK."


class CountAllReduces(TorchDispatchMode):
    """Count the all-reduces of floating-point tensors."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().startswith("c10d::allreduce_"):
            self.count += args[0][0].is_floating_point()
        return func(*args, **(kwargs or {}))


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    number = mesh["pp"].get_local_rank()
    part = DistributedDataParallel(nn.Linear(2, 2), process_group=mesh["dp"].get_group())
    stage = PipelineStage(part, number, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda output, target: (output * target).mean())
    counts = []
    for _ in range(2):
        with CountAllReduces() as counter:
            schedule.step(*([torch.ones(8, 2)] if number == 0 else []), target=torch.ones(8, 2) if number else None)
        counts.append(counter.count)
    if counts[0] > 1:
        print(f"repro: REPRODUCED: {counts[0]} {SIGNATURE}, on rank {dist.get_rank()}\n", end="", flush=True)
        return 1
    assert counts == [1, 1], counts
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
