"""torch.compile replaces the constructor of nn.Module for the rest of the process.

id: compile-replaces-constructor
engine: ddp
symptom: after the first compiled forward, nn.Module.__init__ is another function, even after torch.compiler.reset()
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 1
law: training.sgd_step
signature: nn.Module.__init__ is
ok: repro: a compiled forward leaves the constructor of nn.Module OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/ddp_noreport_compile_replaces_constructor.py

The first capture calls install_generation_tagging_init (torch/_dynamo/mutation_guard.py), which replaces
Module.__init__ and Module.__setstate__ by a wrapper that tags each new module. Nothing restores the functions. The
wrapper builds each later module of the process, compiled or not. The numbers of a training are right.

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

OK = "repro: a compiled forward leaves the constructor of nn.Module OK."


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def main():
    rank = start()
    constructor = nn.Module.__init__
    engine = DistributedDataParallel(nn.Linear(2, 1))
    engine.compile(backend="eager")
    engine(torch.ones(1, 2)).sum().backward()
    torch.compiler.reset()
    if nn.Module.__init__ is not constructor:
        found = nn.Module.__init__.__qualname__
        print(f"repro: REPRODUCED: nn.Module.__init__ is {found} after a compiled forward\n", end="", flush=True)
        return 1
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
