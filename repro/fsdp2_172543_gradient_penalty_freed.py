"""FSDP2 frees weights that the graph of a second derivative still needs.

id: 172543
engine: fsdp2
symptom: the backward of a gradient penalty finds a storage of size 0
reported: https://github.com/pytorch/pytorch/issues/172543
affects: >=2.8.0
fixed: not yet
ranks: 1
law: double_backward.gradient_penalty
signature: out of bounds for storage of size 0
ok: repro: a gradient penalty OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/fsdp2_172543_gradient_penalty_freed.py

The end of the first backward frees weights that the graph of the second backward has saved, and FSDP2 does not gather
them for the second backward. The same happens with a Hessian by torch.func, and with a backward through vmap(grad) of
the model.

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

SIGNATURE = "out of bounds for storage of size 0"
OK = "repro: a gradient penalty OK."


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def penalty(model, x):
    """Return the squared gradient of the squared output with respect to the input."""
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return slope.square().sum()


def main():
    rank = start()
    model = nn.Linear(2, 2, bias=False)
    x = torch.ones(1, 2, requires_grad=True)
    (wanted,) = torch.autograd.grad(penalty(model, x), model.weight)

    fully_shard(model)
    try:
        penalty(model, x).backward()
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    torch.testing.assert_close(model.weight.grad.full_tensor(), wanted)
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
