"""Saving a checkpoint before the first step changes that step of SGD with momentum and weight decay.

id: 164929-momentum
engine: torch_pp
symptom: get_state_dict() before the first step silently gives SGD a momentum of decay x weight
reported: https://github.com/pytorch/pytorch/issues/164929
affects: ==2.13.0
fixed: not yet
ranks: 1
law: pipeline.resume
signature: a save changed the first step
ok: repro: a first step after a save OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/torch_pp_164929_save_makes_momentum.py

torch.distributed.checkpoint makes missing optimizer state by a step on gradients of zeros at a rate of 0
(_init_optim_state). A comment there says that this step "should not disturb SGD because the gradients and lr are both
zero". But SGD adds weight decay to the gradient before it computes the momentum, so the momentum becomes decay x
weight, and the first step adds a part of this momentum. The report is about Adam's step counter, which the same
function leaves at 1.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

SIGNATURE = "a save changed the first step"
OK = "repro: a first step after a save OK."


def make_step(save: bool) -> float:
    """Return a weight of 1 after the first step; with ``save``, a checkpoint is made before the step."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5, weight_decay=0.5)
    if save:
        get_state_dict(model, optimizer)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    return model.weight.item()


def main() -> int:
    right, found = make_step(save=False), make_step(save=True)
    if found != right:
        print(f"repro: REPRODUCED: {SIGNATURE}: expected {right:g}, got {found:g}\n", end="", flush=True)
        return 1
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
