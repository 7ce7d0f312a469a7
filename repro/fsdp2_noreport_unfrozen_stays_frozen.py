"""With reshard_after_forward=False, weights that are unfrozen after a forward stay frozen in the next forward.

id: unfrozen-stays-frozen
engine: fsdp2
symptom: unfreezing after an evaluation of a frozen model: element 0 of tensors does not require grad
reported: no report known
affects: ==2.13.0
fixed: not yet
ranks: 1
law: idle.frozen_forward
signature: element 0 of tensors does not require grad
ok: repro: weights unfrozen after a forward that leaves them gathered OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/fsdp2_noreport_unfrozen_stays_frozen.py

The forward leaves the full weights in place, with the requires_grad that they had when they were gathered.
requires_grad_ of the sharded parameters, which the optimizer has, does not change the full weights. With
reshard_after_forward=True the next forward gathers the weights again.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

SIGNATURE = "element 0 of tensors does not require grad"
OK = "repro: weights unfrozen after a forward that leaves them gathered OK."


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def main():
    rank = start()
    model = nn.Linear(2, 2)
    fully_shard(model, reshard_after_forward=False)
    model.set_gradient_divide_factor(dist.get_world_size())  # gloo does not support the average
    weights = list(model.parameters())
    for weight in weights:
        weight.requires_grad_(False)
    with torch.no_grad():
        model(torch.ones(1, 2))
    for weight in weights:
        weight.requires_grad_(True)
    try:
        model(torch.ones(1, 2)).sum().backward()
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
