"""FSDP2 raises in an fp32 reduction of bf16 weights if only the last micro-batch uses one of the weights.

id: 196996
engine: fsdp2
symptom: "FSDP reduce-scatter expects uniform gradient dtype but got {torch.bfloat16, torch.float32}"
reported: https://github.com/pytorch/pytorch/issues/196996
affects: ==2.13.0
fixed: not yet
ranks: 1
law: window.partly_used_layer
signature: expects uniform gradient dtype
ok: repro: a weight of the last micro-batch alone in bf16 OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/fsdp2_196996_fresh_gradient_dtype.py

Gradients that accumulated without a reduction are in reduce_dtype, but a gradient of the last micro-batch alone is in
param_dtype. All gradients of a group must have one dtype.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

SIGNATURE = "expects uniform gradient dtype"
OK = "repro: a weight of the last micro-batch alone in bf16 OK."


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.always = nn.Linear(2, 2)
        self.late = nn.Linear(2, 2)

    def forward(self, x, use_late):
        output = self.always(x)
        return self.late(output) if use_late else output


def main():
    rank = start()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(TwoLayers(), mp_policy=policy)
    model.set_gradient_divide_factor(dist.get_world_size())  # gloo does not support the average
    try:
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            model(torch.ones(1, 2), use_late=is_last).sum().backward()
    except AssertionError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
