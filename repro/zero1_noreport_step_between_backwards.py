"""A step of ZeroRedundancyOptimizer writes weights in a way that autograd does not notice.

id: zero1-step-between-backwards
engine: zero1
symptom: after a step, a second backward on a retained graph silently gives gradients of mixed old and new weights
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 2
law: double_backward.step_between_retained_backwards
signature: was not refused
ok: repro: a step between two backwards OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/zero1_noreport_step_between_backwards.py

A step writes this rank's parameters by the local optimizer, and receives all others by a broadcast into param.data,
which does not change their version. So on this rank autograd accepts a graph that saved only such broadcast weights. A
step of torch.optim's own optimizer makes autograd raise "modified by an inplace operation".

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

OK = "repro: a step between two backwards OK."


def observe(rank):
    layers = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    optimizer = ZeroRedundancyOptimizer(layers[1].parameters(), torch.optim.SGD, lr=1.0)
    loss = layers(torch.ones(1, 1)).sum()  # the graph saves the weight of the second layer, which one rank owns
    loss.backward(retain_graph=True)
    optimizer.step()
    refused = torch.zeros(dist.get_world_size())
    try:
        loss.backward()
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        refused[rank] = 1
    dist.all_reduce(refused)
    return "" if refused.all() else f"the second backward was not refused on rank {int(refused.argmin())}"


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
