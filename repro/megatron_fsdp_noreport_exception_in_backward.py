"""After an exception in a backward, no later backward of Megatron-FSDP gives gradients.

id: megatron-exception-in-backward
engine: megatron_fsdp
symptom: after an exception in a backward, every later backward silently gives no gradient
reported: no report known
affects: >=0.6.1
fixed: not yet
ranks: 2
law: checkpointing.exception
signature: the next backward gave no gradient
ok: repro: a backward after one that raised gives gradients OK.

Run it with nothing but torch, einops and megatron-fsdp installed:

    torchrun --standalone --nproc_per_node=2 repro/megatron_fsdp_noreport_exception_in_backward.py

The end of a backward reduces gradients and attaches them to the weights. The hook of the root's output queues this end,
unless it has already queued one (_root_pre_backward_hook_issued). The end itself resets this flag. A backward that
raises never runs its end, so no later backward queues one. zero_grad() does not reset the flag.

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

SIGNATURE = "the next backward gave no gradient"
OK = "repro: a backward after one that raised gives gradients OK."


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


class Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("in backward")


def main():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wrapped = fully_shard_model(model, **arguments([nn.Linear]))
    wrapped.ddp_config.gradient_reduce_div_fusion = False  # gloo does not support PREMUL_SUM
    hook = model[1].register_forward_pre_hook(lambda module, inputs: (Raise.apply(*inputs),))
    try:
        wrapped(torch.ones(2, 4)).sum().backward()
    except RuntimeError as error:
        print(f"rank {dist.get_rank()}: {error}", file=sys.stderr)
    hook.remove()
    wrapped.zero_grad_buffer()
    wrapped(torch.ones(2, 4)).sum().backward()
    grads = sum(weight.grad is not None for weight in wrapped.parameters())
    return report("" if grads else "none of the 4 weights has one")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    stand_in_for_cuda()
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
