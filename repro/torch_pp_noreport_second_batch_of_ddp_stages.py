"""The second batch of ScheduleGPipe raises if the stages are in DDP.

id: second-batch-of-ddp-stages
engine: torch_pp
symptom: the second step() of ScheduleGPipe or ScheduleInterleaved1F1B with stages in DDP raises an internal error
reported: no report known
affects: ==2.13.0
fixed: not yet
ranks: 4
law: pipeline.windows
signature: rebuilt parameter indices size is not same
ok: repro: a second batch of stages in DDP OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=4 repro/torch_pp_noreport_second_batch_of_ddp_stages.py

At the second batch DDP rebuilds its buckets, in the order in which gradients became ready in the first batch. GPipe
runs all forwards before the backwards, and the backwards of the earlier micro-batches run in no_sync(), so each
micro-batch adds all parameters to that order. Schedule1F1B with as many micro-batches works.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

SIGNATURE = "rebuilt parameter indices size is not same"
OK = "repro: a second batch of stages in DDP OK."


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    number = mesh["pp"].get_local_rank()
    part = DistributedDataParallel(nn.Linear(2, 2), process_group=mesh["dp"].get_group())
    stage = PipelineStage(part, number, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = ScheduleGPipe(stage, 4, loss_fn=lambda output, target: (output * target).mean())
    for _ in range(2):
        try:
            schedule.step(*([torch.ones(8, 2)] if number == 0 else []), target=torch.ones(8, 2) if number else None)
        except RuntimeError as error:
            cause = str(error.__cause__ or error)
            if SIGNATURE in cause:
                place = f"original model parameters size, on rank {dist.get_rank()}"
                print(f"repro: REPRODUCED: {SIGNATURE} as {place}\n", end="", flush=True)
            return 1
    print(OK)
    return 0


if __name__ == "__main__":
    sys.exit(main())
