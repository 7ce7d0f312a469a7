"""Megatron-FSDP gives a rank with an empty part of a weight no gradient, so clip_grad_norm_ mixes up the norms.

id: megatron-clip-grad-norm
engine: megatron_fsdp
symptom: at stage 3, a rank with an empty part of a weight lacks its gradient, so clip_grad_norm_ reduces other norms
reported: no report known
affects: >=0.6.1
fixed: not yet
ranks: 2
law: training.clip_and_norm
signature: a rank lacks the gradients by which its peers are clipped
ok: repro: every rank has a gradient of each weight OK.

Run it with nothing but torch, einops and megatron-fsdp installed:

    torchrun --standalone --nproc_per_node=2 repro/megatron_fsdp_noreport_clip_grad_norm.py

A rank whose part of a weight is empty gets None as the weight's gradient (update_main_grads), and the other ranks get
DTensors. torch's clip_grad_norm_ skips None, so ranks reduce the norms of different weights together: the result is
wrong, or a rank waits forever. The script compares which gradients the ranks have, and does not call clip_grad_norm_.

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

SIGNATURE = "a rank lacks the gradients by which its peers are clipped"
OK = "repro: every rank has a gradient of each weight OK."


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
    wrapped = fully_shard_model(nn.Sequential(nn.Linear(3, 5)), **arguments([nn.Linear]))
    wrapped.ddp_config.gradient_reduce_div_fusion = False  # gloo does not support PREMUL_SUM
    wrapped(torch.ones(2, 3)).sum().backward()
    missing = [name for name, weight in wrapped.named_parameters() if weight.grad is None]
    return report(f"{', '.join(missing)} on one rank" if missing else "")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    stand_in_for_cuda()
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
