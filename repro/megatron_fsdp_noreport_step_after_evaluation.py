"""After an evaluation between backward and step, the next forward of Megatron-FSDP uses weights from before the step.

id: megatron-step-after-evaluation
engine: megatron_fsdp
symptom: after an evaluation between backward and step, a forward silently uses older weights of the root
reported: no report known
affects: >=0.6.1
fixed: not yet
ranks: 2
law: window.evaluated
signature: the forward after a step used weights from before it
ok: repro: a forward uses the weights of the last step OK.

Run it with nothing but torch, einops and megatron-fsdp installed:

    torchrun --standalone --nproc_per_node=2 repro/megatron_fsdp_noreport_step_after_evaluation.py

Weights outside of the units stay gathered after a forward, and the end of a backward marks them for another gather. A
forward without a backward gathers these weights, and they count as ready afterwards. The step changes the shards, and
the next forward uses the weights that were gathered before.

On a CPU the script replaces the parts of torch.cuda that Megatron-FSDP uses: streams, which have nothing to wait for,
and the number of the device.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from megatron_fsdp import fully_shard_model, fully_shard_optimizer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

SIGNATURE = "the forward after a step used weights from before it"
OK = "repro: a forward uses the weights of the last step OK."


class Stream:
    def wait_stream(self, other):
        pass

    def record_event(self):
        return self

    def wait(self):
        pass


def stand_in_for_cuda():
    torch.cuda.Stream = torch.cuda.current_stream = Stream
    torch.cuda.stream = lambda stream: nullcontext()
    torch.cuda.current_device = lambda: 0
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda: None
    torch.Tensor.cuda = lambda tensor: tensor


def arguments(units):
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("data", "tp"))
    names = {"device_mesh": mesh, "dp_shard_dim": "data", "tp_dim": "tp", "device": torch.device("cpu")}
    return {**names, "fsdp_unit_modules": units, "zero_dp_strategy": 3}


def report(found):
    answers = [None] * dist.get_world_size()
    dist.all_gather_object(answers, found)
    found = next((answer for answer in answers if answer), "")
    if dist.get_rank() == 0:
        if found:
            print(f"repro: REPRODUCED: {SIGNATURE}: {found}\n", end="", flush=True)
        else:
            print(OK, flush=True)
    return int(bool(found))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.unit = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, inputs):
        return self.unit(inputs) * self.scale


def main():
    torch.manual_seed(0)
    wrapped = fully_shard_model(Model(), **arguments([nn.Linear]))
    wrapped.ddp_config.gradient_reduce_div_fusion = False  # gloo does not support PREMUL_SUM
    optimizer = fully_shard_optimizer(torch.optim.SGD(wrapped.parameters(), lr=0.5))
    scale = dict(wrapped.module.named_parameters())["scale"]  # this rank's shard, which the optimizer steps
    wrapped(torch.ones(2, 4)).sum().backward()
    with torch.no_grad():
        wrapped(torch.ones(2, 4))
    optimizer.step()
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, scale.detach().to_local().tolist())
    wrapped(torch.ones(2, 4))
    used, expected = wrapped.module.scale.tolist(), [number for part in parts for number in part]
    return report("" if used == expected else f"scale is {expected[0]:.4g}, and the forward used {used[0]:.4g}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    stand_in_for_cuda()
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
