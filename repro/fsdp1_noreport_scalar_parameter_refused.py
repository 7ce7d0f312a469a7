"""FSDP1 raises for a model with a parameter without dimensions.

id: fsdp1-scalar-refused
engine: fsdp1
symptom: wrapping a model with a scalar parameter raises a ValueError, which the documentation does not mention
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 2
law: parameters.every_kind
signature: FSDP doesn't support scalar parameters
ok: repro: a scalar parameter OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp1_noreport_scalar_parameter_refused.py

A FlatParameter consists of flattened parameters, and a scalar could be one of its elements. The message recommends a
parameter of one element and one dimension instead.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

OK = "repro: a scalar parameter OK."
CPU = torch.device("cpu")  # the script shows the bug on gloo


def observe(_rank):
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.tensor(1.0))
    try:
        FullyShardedDataParallel(model, use_orig_params=True, device_id=CPU)
    except ValueError as error:
        if "FSDP doesn't support scalar parameters" not in str(error):
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
