"""ZeroRedundancyOptimizer raises for parameters of more than one dtype.

id: several-dtypes-refused
engine: zero1
symptom: the constructor raises if parameters have different dtypes
reported: documented limit, https://docs.pytorch.org/docs/stable/distributed.optim.html
affects: >=2.8.0
fixed: not yet
ranks: 1
law: parameters.every_kind
signature: ZeroRedundancyOptimizer only supports using the same dense type for all parameters
ok: repro: ZeroRedundancyOptimizer over two dtypes OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/zero1_noreport_several_dtypes_refused.py

The documentation says that ZeroRedundancyOptimizer "requires that all of the passed-in parameters are the same dense
type", and no option lifts this limit. torch.optim's own optimizers accept both dtypes.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

SIGNATURE = "ZeroRedundancyOptimizer only supports using the same dense type for all parameters"
OK = "repro: ZeroRedundancyOptimizer over two dtypes OK."


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def two_dtypes():
    """Return a float32 weight and a bfloat16 weight, each with a gradient of one."""
    weights = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    return weights


def main():
    rank = start()
    wanted, got = two_dtypes(), two_dtypes()
    torch.optim.SGD(wanted, lr=0.5).step()

    try:
        ZeroRedundancyOptimizer(got, optimizer_class=torch.optim.SGD, lr=0.5).step()
    except ValueError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    torch.testing.assert_close(got, wanted)
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
