"""FSDP1 raises if one wrapped module has weights of several dtypes.

id: fsdp1-two-dtypes
engine: fsdp1
symptom: the constructor raises for a frozen bf16 weight beside a trained fp32 weight, as in LoRA
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 2
law: precision.weights_of_two_dtypes
signature: Must flatten tensors with uniform dtype
ok: repro: wrapped weights of two dtypes OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp1_noreport_two_dtypes.py

FSDP1 flattens the weights of a wrapped module into one tensor, which has one dtype.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

OK = "repro: wrapped weights of two dtypes OK."
CPU = torch.device("cpu")  # the script shows the bug on gloo


def observe(_rank):
    model = nn.Sequential(nn.Linear(2, 2).bfloat16().requires_grad_(False), nn.Linear(2, 2))
    try:
        FullyShardedDataParallel(model, use_orig_params=True, device_id=CPU)
    except ValueError as error:
        if "Must flatten tensors with uniform dtype" not in str(error):
            raise
        return str(error)
    return ""


def main():
    dist.init_process_group("gloo")
    problem = observe(dist.get_rank())
    if problem:
        print(f"repro: REPRODUCED: {problem}\n", end="", flush=True)
        return 1
    if dist.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
