"""Megatron-FSDP's fully_shard drops the parameter groups of an optimizer.

id: megatron-parameter-groups
engine: megatron_fsdp
symptom: fully_shard silently puts all parameters into one group, so the learning rates of groups are lost
reported: no report known
affects: >=0.6.1
fixed: not yet
ranks: 2
law: training.optimizer_options
signature: the learning rate of a parameter group is lost
ok: repro: an optimizer keeps the learning rates of its groups OK.

Run it with nothing but torch, einops and megatron-fsdp installed:

    torchrun --standalone --nproc_per_node=2 repro/megatron_fsdp_noreport_parameter_groups.py

fully_shard clears optimizer.param_groups and adds one group of all parameters. Every parameter gets the optimizer's
defaults. fully_shard calls fully_shard_model and fully_shard_optimizer, which keep groups that the caller makes between
the two calls.

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
from megatron_fsdp import fully_shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

SIGNATURE = "the learning rate of a parameter group is lost"
OK = "repro: an optimizer keeps the learning rates of its groups OK."


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


def main():
    model = nn.Sequential(nn.Linear(4, 4))
    groups = [{"params": [model[0].weight]}, {"params": [model[0].bias], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    fully_shard(model, optimizer, **arguments([nn.Linear]))
    rates = [group["lr"] for group in optimizer.param_groups]
    return report("" if rates == [0.1, 0.5] else f"expected [0.1, 0.5], got {rates}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    stand_in_for_cuda()
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
