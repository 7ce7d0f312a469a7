"""Megatron-FSDP raises KeyError for a model with a float64 weight.

id: megatron-float64-weight
engine: megatron_fsdp
symptom: building a model with a float64 weight raises KeyError: torch.float64
reported: no report known
affects: >=0.6.1
fixed: not yet
ranks: 2
law: parameters.every_kind
signature: KeyError: torch.float64
ok: repro: a model with a weight in float64 is built OK.

Run it with nothing but torch, einops and megatron-fsdp installed:

    torchrun --standalone --nproc_per_node=2 repro/megatron_fsdp_noreport_float64_weight.py

The dictionary that counts the elements of buffers by dtype has no entry for float64 (param_and_grad_buffer.py).

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

SIGNATURE = "KeyError: torch.float64"
OK = "repro: a model with a weight in float64 is built OK."


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
    try:
        fully_shard_model(nn.Sequential(nn.Linear(4, 4, dtype=torch.float64)), **arguments([nn.Linear]))
    except KeyError as error:
        print(f"rank {dist.get_rank()}: KeyError: {error}", file=sys.stderr)
        return report("when the buffers are made")
    return report("")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    stand_in_for_cuda()
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
