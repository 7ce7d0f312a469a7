"""With Megatron-FSDP, the backward of the second of two losses of one forward raises.

id: megatron-two-backwards
engine: megatron_fsdp
symptom: after one forward, the second of two backwards raises KeyError at stage 3
reported: no report known
affects: >=0.6.1
fixed: not yet
ranks: 2
law: backward.two_outputs_two_backwards
signature: KeyError: DTensor(
ok: repro: two losses of one forward have a backward each OK.

Run it with nothing but torch, einops and megatron-fsdp installed:

    torchrun --standalone --nproc_per_node=2 repro/megatron_fsdp_noreport_two_backwards.py

The end of a backward treats the backward of the whole model as done: it replaces the weights by DTensors
(finish_grad_sync). The hooks of a second backward look up the current weights of a module, and find no buffer for them.

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
from megatron_fsdp import fully_shard_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

SIGNATURE = "KeyError: DTensor("
OK = "repro: two losses of one forward have a backward each OK."


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
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs):
        return self.first(inputs), self.second(inputs)


def main():
    wrapped = fully_shard_model(Model(), **arguments([nn.Linear]))
    wrapped.ddp_config.gradient_reduce_div_fusion = False  # gloo does not support PREMUL_SUM
    first, second = wrapped(torch.ones(2, 4))
    first.sum().backward()
    try:
        second.sum().backward()
    except KeyError as error:
        print(f"rank {dist.get_rank()}: KeyError: {error}", file=sys.stderr)
        return report("in the second backward")
    return report("")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    stand_in_for_cuda()
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
