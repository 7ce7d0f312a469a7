"""FSDP2 reshards a group when a backward within its forward ends.

id: backward-in-forward-reshards
engine: fsdp2
symptom: a forward that runs a backward of its own finds sharded weights after it
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 2
law: backward.backward_in_forward
signature: got mixed torch.Tensor and DTensor
ok: repro: a backward within a forward OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp2_noreport_backward_in_forward.py

The group's weights are resharded at the end of any backward that reached them, also while the group's own forward
still needs them. With a group for each layer it is right.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

OK = "repro: a backward within a forward OK."


class Tiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.last = nn.Linear(2, 2)

    def forward(self, x):
        hidden = self.first(x)
        leaf = hidden.detach().requires_grad_()
        self.last(leaf).sum().backward()
        return self.last(hidden)


def observe(_rank):
    model = fully_shard(Tiled())
    x = torch.ones(1, 2)
    try:
        for _ in range(2):
            model(x).sum().backward()
    except RuntimeError as error:
        if "got mixed torch.Tensor and DTensor" not in str(error):
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
