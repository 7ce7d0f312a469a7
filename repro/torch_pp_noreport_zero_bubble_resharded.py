"""Zero-bubble schedules lose gradients of groups that fully_shard reshards after the forward.

id: zero-bubble-resharded
engine: torch_pp
symptom: with zero bubbles and fully_shard's default reshard_after_forward, gradients of a stage are too small or None
reported: no report known
affects: ==2.13.0
fixed: not yet
ranks: 4
law: pipeline.training
signature: gradients were lost
ok: repro: zero-bubble schedules keep the gradients of resharded groups OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=4 repro/torch_pp_noreport_zero_bubble_resharded.py

stage_backward_weight (torch/distributed/pipelining/_backward.py) finds weights by the current parameters of the module.
After a reshard these are the shards, which are not in the graph, so the gradients of the unsharded weights are dropped.
With reshard_after_forward=False, which torchtitan sets in pipelines, the gradients are right.

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
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

SIGNATURE = "gradients were lost"
OK = "repro: zero-bubble schedules keep the gradients of resharded groups OK."
MICRO_BATCHES = 4


def loss(output, target):
    return (output * target).mean()


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh["pp"], mesh["dp"]
    first, replica = pp.get_local_rank(), dp.get_local_rank()
    layers = [nn.Linear(2, 2, bias=False) for _ in range(4)]
    for number, layer in enumerate(layers):
        nn.init.constant_(layer.weight, 1.0 + number)  # small integers: no sum rounds, so all orders give equal sums
    inputs = [torch.full((8, 2), 1.0 + number) for number in range(2)]
    target = torch.ones(8, 2)
    sum(loss(nn.Sequential(*layers)(x), target) / 2 for x in inputs).backward()
    wanted = [layer.weight.grad.clone() for layer in layers]
    for layer in layers:
        layer.zero_grad()
    stages = []
    for number in (first, first + 2):
        part = nn.Sequential(layers[number])
        fully_shard(layers[number], mesh=dp)
        fully_shard(part, mesh=dp)
        stages.append(PipelineStage(part, number, 4, torch.device("cpu"), group=pp.get_group()))
    schedule = ScheduleInterleavedZeroBubble(stages, MICRO_BATCHES, loss_fn=loss)
    schedule.step(*([inputs[replica]] if first == 0 else []), **({"target": target} if first == 1 else {}))
    wrong = []
    for number in (first, first + 2):
        grad = layers[number].weight.grad
        grad = None if grad is None else grad.full_tensor()
        if grad is None or not torch.equal(grad, wanted[number]):
            wrong.append(number)
    everywhere = [[] for _ in range(4)]
    dist.all_gather_object(everywhere, wrong)
    numbers = sorted({number for some in everywhere for number in some})
    if numbers:
        print(f"repro: REPRODUCED: {SIGNATURE} of the stages {numbers}\n", end="", flush=True)
        return 1
    if dist.get_rank() == 0:
        print(OK)
    return 0


if __name__ == "__main__":
    code = main()
    dist.destroy_process_group()
    sys.exit(code)
