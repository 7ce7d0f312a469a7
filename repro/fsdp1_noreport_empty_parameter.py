"""FSDP1 raises for a module whose own parameters have no elements.

id: fsdp1-empty-parameter
engine: fsdp1
symptom: wrapping a model with an empty parameter raises an AssertionError
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 2
law: parameters.every_kind
signature: unsharded_end_idx
ok: repro: an empty parameter OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp1_noreport_empty_parameter.py

The metadata of a shard holds the indices of the first and the last element of a FlatParameter. FSDP1 asserts that the
first is not after the last. FSDP1 accepts an empty parameter beside other parameters of the same FSDP instance.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

OK = "repro: an empty parameter OK."
CPU = torch.device("cpu")  # the script shows the bug on gloo


def wrap(module):
    return FullyShardedDataParallel(module, use_orig_params=True, device_id=CPU)


def observe(_rank):
    model = nn.Sequential(wrap(nn.Linear(2, 2)))
    model.empty = nn.Parameter(torch.empty(0))
    try:
        wrap(model)
    except AssertionError as error:
        if "unsharded_end_idx" not in str(error):
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
