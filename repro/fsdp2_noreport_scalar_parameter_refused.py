"""fully_shard raises for a model with a parameter without dimensions.

id: scalar-parameter-refused
engine: fsdp2
symptom: fully_shard of a model with a scalar parameter raises a ValueError, which its documentation does not mention
reported: no report known
affects: >=2.8.0
fixed: not yet
ranks: 1
law: parameters.every_kind
signature: fully_shard doesn't support scalar parameters
ok: repro: a scalar parameter OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/fsdp2_noreport_scalar_parameter_refused.py

FSDP2 shards a parameter along dimension 0, and a scalar has no dimension. FSDP2 does not reduce a parameter in
ignored_params, so the caller has to reduce its gradient.

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

SIGNATURE = "fully_shard doesn't support scalar parameters"
OK = "repro: a scalar parameter OK."


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.layer(x) * self.scale


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def main():
    rank = start()
    model = Scaled()
    x = torch.ones(1, 1)
    wanted = torch.autograd.grad(model(x).sum(), list(model.parameters()))

    try:
        fully_shard(model)
    except ValueError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    model(x).sum().backward()
    torch.testing.assert_close([param.grad.full_tensor() for param in model.parameters()], list(wanted))
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
