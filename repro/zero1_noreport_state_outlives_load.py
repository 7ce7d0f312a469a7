"""ZeroRedundancyOptimizer.load_state_dict keeps the state of parameters for which the checkpoint has no state.

id: state-outlives-load
engine: zero1
symptom: after a load of a checkpoint from before the first step, the next step uses momentum of the steps since then
reported: no report known
affects: ==2.13.0
fixed: not yet
ranks: 1
law: training.any_order
signature: the weight moved by -1.5 where -1.0 is right
ok: repro: ZeroRedundancyOptimizer with a checkpoint from before the first step OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/zero1_noreport_state_outlives_load.py

load_state_dict copies the state in the checkpoint over its own state, parameter by parameter, and clears nothing. A
checkpoint from before the first step has no state, so all state of the steps since then stays. torch.optim's own
load_state_dict replaces the whole state. Here the gradient is always 1, the rate 1 and the momentum 0.5: a first step
moves the weight by -1, and a step on an old momentum by -1.5.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

SIGNATURE = "the weight moved by -1.5 where -1.0 is right"
OK = "repro: ZeroRedundancyOptimizer with a checkpoint from before the first step OK."


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def step(weight, optimizer):
    """Run a step with the gradient 1 and return how far it moves the weight."""
    before = weight.item()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return weight.item() - before


def after_a_load(optimizer_of):
    """Return how far the first step moves the weight after loading a checkpoint from before any step."""
    weight = nn.Parameter(torch.zeros(()))
    optimizer = optimizer_of([weight])
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict()
    checkpoint = copy.deepcopy(optimizer.state_dict())
    step(weight, optimizer)
    optimizer.load_state_dict(checkpoint)
    return step(weight, optimizer)


def main():
    rank = start()
    options = {"lr": 1.0, "momentum": 0.5}
    wanted = after_a_load(lambda weights: torch.optim.SGD(weights, **options))
    moved = after_a_load(lambda weights: ZeroRedundancyOptimizer(weights, torch.optim.SGD, **options))
    if moved != wanted:
        found = f"the weight moved by {moved} where {wanted} is right"
        if found != SIGNATURE:
            raise AssertionError(found)
        print(f"repro: REPRODUCED: {found}\n", end="", flush=True)
        return 1
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
