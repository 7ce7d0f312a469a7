"""FSDP1's clip_grad_norm_ raises for gradients of float64.

id: fsdp1-float64-clip
engine: fsdp1
symptom: clip_grad_norm_ of a float64 model raises a RuntimeError about a dtype, which is not documented
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 2
law: training.clip_wide
signature: should be convertible without narrowing to the specified dtype
ok: repro: clipped float64 gradients OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp1_noreport_float64_clip.py

_get_grad_norm asks vector_norm for the norm of each gradient in float32, and vector_norm does not narrow a float64
gradient.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

OK = "repro: clipped float64 gradients OK."
CPU = torch.device("cpu")  # the script shows the bug on gloo


def observe(_rank):
    model = FullyShardedDataParallel(nn.Linear(2, 2).double(), use_orig_params=True, device_id=CPU)
    model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    try:
        model.clip_grad_norm_(1.0)
    except RuntimeError as error:
        if "should be convertible without narrowing to the specified dtype" not in str(error):
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
