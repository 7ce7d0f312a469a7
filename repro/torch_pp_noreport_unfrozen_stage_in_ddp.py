"""DDP does not reduce the gradient of a pipeline stage's weight that is unfrozen after DDP was built.

id: unfrozen-stage-in-ddp
engine: torch_pp
symptom: in a stage in DDP, each rank silently keeps its own gradient of a weight that was frozen when DDP was built
reported: no report known
affects: ==2.13.0
fixed: not yet
ranks: 2
law: pipeline.frozen
signature: the ranks have different gradients
ok: repro: a weight that is unfrozen in DDP OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/torch_pp_noreport_unfrozen_stage_in_ddp.py

DDP registers the hooks that reduce gradients in its constructor, and its documentation says so: 'if you change the
model's parameters afterwards, gradient reduction functions no longer match the correct set of parameters'. The caller
puts a stage into DDP before a schedule runs it, so a training that unfreezes layers has to build its stages again. A
stage in fully_shard trains unfrozen layers.

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

OK = "repro: a weight that is unfrozen in DDP OK."


def main() -> int:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    part = nn.Linear(1, 1)
    part.weight.requires_grad_(False)
    wrapped = DistributedDataParallel(part, process_group=mesh["dp"].get_group())
    stage = PipelineStage(wrapped, 0, 1, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = ScheduleGPipe(stage, 1, loss_fn=lambda output, _: output.sum())
    inputs = torch.full((1, 1), 1.0 + dist.get_rank())  # the gradient of the weight on this rank
    schedule.step(inputs, target=inputs, losses=[])
    part.weight.requires_grad_(True)
    schedule.step(inputs, target=inputs, losses=[])
    everywhere = [torch.zeros(1, 1) for _ in range(2)]
    dist.all_gather(everywhere, part.weight.grad)
    grads = [grad.item() for grad in everywhere]
    if grads[0] != grads[1]:
        if dist.get_rank() == 0:
            print(f"repro: REPRODUCED: the ranks have different gradients: {grads}\n", end="", flush=True)
    elif dist.get_rank() == 0:
        print(OK, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return int(grads[0] != grads[1])


if __name__ == "__main__":
    sys.exit(main())
