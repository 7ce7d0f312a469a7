"""FSDP2 raises in the first forward if one group has parameters of two dtypes.

id: group-of-two-dtypes
engine: fsdp2
symptom: the first forward of a sharded model with a float64 layer raises AssertionError; DDP trains the model
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 1
law: parameters.every_kind
signature: FSDP expects uniform original parameter dtype
ok: repro: parameters of two dtypes OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/fsdp2_noreport_group_of_two_dtypes.py

FSDP2 gathers the parameters of one fully_shard in one flat buffer, which has one dtype. A separate fully_shard for the
layer of the other dtype avoids the error.

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

SIGNATURE = "FSDP expects uniform original parameter dtype"
OK = "repro: parameters of two dtypes OK."


class TwoDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.narrow = nn.Linear(1, 1, bias=False)
        self.wide = nn.Linear(1, 1, bias=False, dtype=torch.float64)

    def forward(self, x):
        return self.wide(self.narrow(x).double())


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def main():
    rank = start()
    model = TwoDtypes()
    x = torch.ones(1, 1)
    wanted = torch.autograd.grad(model(x).sum(), list(model.parameters()))

    fully_shard(model)
    try:
        model(x).sum().backward()
    except AssertionError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    torch.testing.assert_close([param.grad.full_tensor() for param in model.parameters()], list(wanted))
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
