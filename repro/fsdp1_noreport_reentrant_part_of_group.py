"""FSDP1 frees weights that a backward still needs if part of an FSDP instance is in a reentrant checkpoint.

id: fsdp1-part-recomputed
engine: fsdp1
symptom: a layer of an FSDP instance in a reentrant checkpoint raises "storage of size 0", or SIGSEGV ends the process
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 2
law: checkpointing.block
signature: out of bounds for storage of size 0
ok: repro: a layer in a reentrant checkpoint OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp1_noreport_reentrant_part_of_group.py

The checkpoint runs a backward of its own within the backward. At the end of this inner backward FSDP1 treats the
gradient of the FlatParameter as complete: FSDP1 reduces the gradient and frees the weights, which the layers before the
checkpoint still need. If backward reads the size of a saved weight again, it raises this RuntimeError. A product with a
saved weight reads freed memory, and SIGSEGV ends the process. Checkpoints that are not reentrant are right, and an FSDP
instance for each layer is right too.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.checkpoint import checkpoint

OK = "repro: a layer in a reentrant checkpoint OK."
CPU = torch.device("cpu")  # the script shows the bug on gloo


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x):
        return checkpoint(self.second, self.first(x), use_reentrant=True)


def observe(_rank):
    engine = FullyShardedDataParallel(Model(), use_orig_params=True, device_id=CPU)
    x = torch.ones(1, 8, requires_grad=True)
    try:
        engine(x).sum().backward()
    except RuntimeError as error:
        if "out of bounds for storage of size 0" not in str(error):
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
