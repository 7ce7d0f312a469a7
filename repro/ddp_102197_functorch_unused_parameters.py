"""torch.func transforms over DDP raise if DDP looks for unused parameters.

id: 102197
engine: ddp
symptom: vmap over DDP with find_unused_parameters or static_graph raises "must override the setup_context staticmethod"
reported: https://github.com/pytorch/pytorch/issues/102197
affects: >=2.8.0
fixed: not yet
ranks: 1
law: torch_func.through_transforms
signature: must override the setup_context staticmethod
ok: repro: vmap over DDP with find_unused_parameters OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/ddp_102197_functorch_unused_parameters.py

_DDPSink (torch.nn.parallel.distributed) has no setup_context. Without find_unused_parameters and static_graph
transforms work. But a model with an unused parameter needs one of the two options, so torch.func and unused parameters
exclude each other.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SIGNATURE = "must override the setup_context staticmethod"
OK = "repro: vmap over DDP with find_unused_parameters OK."


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
    x = torch.arange(6.0).reshape(3, 2)
    wanted = torch.func.vmap(model)(x).detach()

    engine = DistributedDataParallel(model, find_unused_parameters=True)
    try:
        got = torch.func.vmap(engine)(x).detach()
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        line = str(error).splitlines()[0]
        print(f"repro: REPRODUCED: {line}\n", end="", flush=True)
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
