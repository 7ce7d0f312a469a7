"""fully_shard_optimizer of Megatron-FSDP makes an optimizer step before the first backward.

id: 5974
engine: megatron_fsdp
symptom: fully_shard_optimizer makes a step on zero gradients: weights decay, and Adam's count starts at 1
reported: https://github.com/NVIDIA/Megatron-LM/issues/5974
affects: >=0.6.1
fixed: not yet
ranks: 2
law: training.trajectory
signature: the optimizer has stepped before the first step
ok: repro: an optimizer that has made no step has changed no weight OK.

Run it with nothing but torch, einops and megatron-fsdp installed:

    torchrun --standalone --nproc_per_node=2 repro/megatron_fsdp_5974_step_before_training.py

To create state into which a checkpoint can be read, fully_shard_optimizer sets all gradients to zero and calls step().
In this step AdamW multiplies the weights by 1 - lr * weight_decay. Later AdamW corrects the bias of its first real step
as that of a second step.

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

SIGNATURE = "the optimizer has stepped before the first step"
OK = "repro: an optimizer that has made no step has changed no weight OK."


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
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    fully_shard(model, optimizer, **arguments([nn.Linear]))
    steps = [float(state["step"]) for state in optimizer.state.values()]
    weights = dict(model.named_parameters())["0.weight"].to_local()
    changed = weights.numel() and float(weights.max()) != 1.0
    return report(f"weights of 1 are {float(weights.max()):.4g}, steps {steps}" if changed or any(steps) else "")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    stand_in_for_cuda()
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
