"""FSDP1 drops the accumulated gradient of a parameter that is frozen between two backwards.

id: frozen-loses-gradient
engine: fsdp1
symptom: freezing a layer between two backwards of one step loses the layer's accumulated gradient
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 2
law: parameters.frozen_and_unfrozen
signature: gradient is
ok: repro: the gradient of a frozen layer OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp1_noreport_frozen_loses_gradient.py

In plain PyTorch requires_grad_(False) keeps the accumulated gradient of a parameter. FSDP1 sets its views of the
gradient to None for a parameter that requires no gradient, so the accumulated gradient is lost.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

OK = "repro: the gradient of a frozen layer OK."
CPU = torch.device("cpu")  # the script shows the bug on gloo


def wrap(module):
    return FullyShardedDataParallel(module, use_orig_params=True, device_id=CPU)


def observe(_rank):
    layers = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for layer in layers:
        nn.init.ones_(layer.weight)
    engine = wrap(nn.Sequential(*map(wrap, layers)))
    first = next(engine.parameters())
    for frozen in (False, True):
        first.requires_grad_(not frozen)
        engine(torch.ones(1, 1)).sum().backward()
    first.requires_grad_(True)
    with FullyShardedDataParallel.summon_full_params(engine, with_grads=True):
        got = layers[0].weight.grad
    return "" if got is not None and float(got) == 1 else f"gradient is {got}, expected 1"


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
