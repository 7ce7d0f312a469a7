"""With Megatron-FSDP, a loss in a dictionary gives no gradients if it does not use the last submodule.

id: megatron-outputs-in-a-dictionary
engine: megatron_fsdp
symptom: a loss in a dictionary that does not use the last submodule silently gives no gradients
reported: no report known
affects: >=0.6.1
fixed: not yet
ranks: 2
law: backward.outputs
signature: no weight has a gradient
ok: repro: a loss in a dictionary gives gradients OK.

Run it with nothing but torch, einops and megatron-fsdp installed:

    torchrun --standalone --nproc_per_node=2 repro/megatron_fsdp_noreport_outputs_in_a_dictionary.py

Megatron-FSDP registers the hook that begins a backward on the tensors of the root's output, and on the output of the
last submodule. It looks for these tensors only in a tensor, a tuple or a list (create_custom_backward_hook). Without
that hook the end of the backward, which attaches the reduced gradients to the weights, never runs.

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

SIGNATURE = "no weight has a gradient"
OK = "repro: a loss in a dictionary gives gradients OK."


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
        self.other = nn.Linear(4, 4)  # the last submodule, which this loss does not use

    def forward(self, inputs):
        return {"loss": self.unit(inputs).sum()}


def main():
    wrapped = fully_shard_model(Model(), **arguments([nn.Linear]))
    wrapped.ddp_config.gradient_reduce_div_fusion = False  # gloo does not support PREMUL_SUM
    wrapped(torch.ones(2, 4))["loss"].backward()
    grads = sum(weight.grad is not None for weight in wrapped.parameters())
    return report("" if grads else "after the backward of a loss in a dictionary")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    stand_in_for_cuda()
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
