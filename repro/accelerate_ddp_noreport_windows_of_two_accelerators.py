"""A second Accelerator overwrites the accumulation window of the first Accelerator.

id: windows-of-two-accelerators
engine: accelerate_ddp
symptom: with a window of 4, an Accelerator steps after every micro-batch once another Accelerator has been built
reported: no report known
affects: ==1.15.0
fixed: not yet
ranks: 2
law: engines.interleaved
signature: stepped inside its accumulation window
ok: repro: the window of the first Accelerator is kept OK.

Run it with nothing but torch and accelerate installed:

    torchrun --standalone --nproc_per_node=2 repro/accelerate_ddp_noreport_windows_of_two_accelerators.py

gradient_accumulation_steps is an entry of GradientState, which all Accelerators of a process share
(accelerate/state.py). The constructor of each Accelerator overwrites this entry. Once an Accelerator for a teacher
exists, a student's window of 4 ends after each micro-batch, and its losses are divided by 1. accelerate gives no
warning.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

SIGNATURE = "stepped inside its accumulation window"
OK = "repro: the window of the first Accelerator is kept OK."


def main():
    cpu = not torch.cuda.is_available()
    first = Accelerator(cpu=cpu, gradient_accumulation_steps=4)
    model = nn.Linear(1, 1)
    wrapped, optimizer = first.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.weight.detach().clone()
    Accelerator(cpu=cpu)
    with first.accumulate(wrapped):
        first.backward(wrapped(torch.ones(1, 1, device=first.device)).sum())
        optimizer.step()
        optimizer.zero_grad()
    if torch.equal(model.weight, before):
        print(OK)
        return 0
    change = (before - model.weight).item()
    print(f"repro: REPRODUCED: the first Accelerator {SIGNATURE}, by {change:g}\n", end="", flush=True)
    return 1


if __name__ == "__main__":
    code = main()
    dist.destroy_process_group()
    sys.exit(code)
