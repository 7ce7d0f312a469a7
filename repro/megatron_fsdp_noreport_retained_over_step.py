"""Megatron-FSDP runs a backward on a graph from before a step, although PyTorch raises in this case.

id: megatron-retained-over-step
engine: megatron_fsdp
symptom: at stage 0, a backward on a retained graph after a step silently uses the weights from before the step
reported: no report known
affects: >=0.6.1
fixed: not yet
ranks: 2
law: double_backward.step_between_retained_backwards
signature: refused[0]
ok: repro: a backward on a graph from before a step is refused OK.

Run it with nothing but torch, einops and megatron-fsdp installed:

    torchrun --standalone --nproc_per_node=2 repro/megatron_fsdp_noreport_retained_over_step.py

The step changes the optimizer's weights, and Megatron-FSDP copies them into the weights of the model. The graph has
saved the model's weights. A copy into param.data does not change their version, so autograd does not notice it.

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

SIGNATURE = "refused[0]"
OK = "repro: a backward on a graph from before a step is refused OK."


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
    return {**names, "fsdp_unit_modules": units, "zero_dp_strategy": 0}


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


def main():
    wrapped = fully_shard_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), **arguments([nn.Linear]))
    wrapped.ddp_config.gradient_reduce_div_fusion = False  # gloo does not support PREMUL_SUM
    optimizer = fully_shard_optimizer(torch.optim.SGD(wrapped.parameters(), lr=0.5))
    loss = wrapped(torch.ones(2, 4)).square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    try:
        loss.backward()
    except RuntimeError as error:
        print(f"rank {dist.get_rank()}: {error}", file=sys.stderr)
        return report("")
    return report("expected an error, and the backward ran")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    stand_in_for_cuda()
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
