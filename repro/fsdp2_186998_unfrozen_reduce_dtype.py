"""FSDP2 reduces weights in the wrong dtype if they were frozen at the first forward and unfrozen later.

id: 186998
engine: fsdp2
symptom: under mixed precision, unfreezing raises "attempting to assign a gradient with dtype 'c10::BFloat16'"
reported: https://github.com/pytorch/pytorch/issues/186998
affects: ==2.13.0
fixed: not yet
ranks: 1
law: idle.frozen_forward
signature: attempting to assign a gradient with dtype
ok: repro: weights unfrozen after the first forward, in bf16 OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/fsdp2_186998_unfrozen_reduce_dtype.py

The first forward decides the dtypes of a group by its trainable weights, and at that time the group has none.

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

SIGNATURE = "attempting to assign a gradient with dtype"
OK = "repro: weights unfrozen after the first forward, in bf16 OK."


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def main():
    rank = start()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).requires_grad_(False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mp_policy=policy)
        layer.set_gradient_divide_factor(dist.get_world_size())  # gloo does not support the average
    model(torch.ones(1, 2))
    model.requires_grad_(True)
    try:
        model(torch.ones(1, 2)).sum().backward()
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    assert model[0].weight.grad.dtype == torch.float32, model[0].weight.grad.dtype
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
