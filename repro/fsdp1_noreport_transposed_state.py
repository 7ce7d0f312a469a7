"""FSDP1 loads another optimizer state than it saved if a weight is not contiguous.

id: fsdp1-transposed-state
engine: fsdp1
symptom: optim_state_dict and its load silently change the values of the Adam moments of a transposed weight
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 2
law: state.resume
signature: after the load exp_avg differs
ok: repro: the loaded moments are those that were saved OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp1_noreport_transposed_state.py

The weight is a transposed view when FSDP1 wraps it. Saved and loaded weights are right.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

OK = "repro: the loaded moments are those that were saved OK."
CPU = torch.device("cpu")  # the script shows the bug on gloo


def full_state(model, optimizer):
    state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    return {name: entries["exp_avg"].clone() for name, entries in state.items() if "exp_avg" in entries}


def observe(_rank):
    layer = nn.Linear(2, 3, bias=False)
    layer.weight = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())  # not contiguous
    model = FullyShardedDataParallel(layer, use_orig_params=True, device_id=CPU)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.tensor([[1.0, 10.0]])).mul(torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    optimizer.step()
    saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    before = full_state(model, optimizer)
    optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, saved))
    after = full_state(model, optimizer)
    for name, moments in before.items():
        if not torch.equal(moments, after[name]):
            return f"after the load exp_avg differs: {after[name].tolist()}, and {moments.tolist()} was saved"
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
