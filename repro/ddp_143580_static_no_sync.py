"""DDP with a static graph fails an internal assertion if the first iteration runs under no_sync.

id: 143580
engine: ddp
symptom: with static_graph=True, a first iteration under no_sync fails an internal assertion
reported: https://github.com/pytorch/pytorch/issues/143580
affects: >=2.8.0
fixed: not yet
ranks: 1
law: training.no_sync
signature: expect_autograd_hooks_ INTERNAL ASSERT FAILED
ok: repro: a static graph that begins under no_sync OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/ddp_143580_static_no_sync.py

Gradient accumulation begins under no_sync(), so static_graph=True and accumulation exclude each other unless the first
iteration is synchronised. Open pull request: #187732.

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

SIGNATURE = "expect_autograd_hooks_ INTERNAL ASSERT FAILED"
OK = "repro: a static graph that begins under no_sync OK."


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def main():
    rank = start()
    model = nn.Linear(1, 1, bias=False)
    inputs = [torch.full((1, 1), each + 1.0) for each in range(dist.get_world_size())]
    wanted = 2 * torch.stack([torch.autograd.grad(model(x).sum(), model.weight)[0] for x in inputs]).mean(0)

    engine = DistributedDataParallel(model, static_graph=True)
    try:
        with engine.no_sync():
            engine(inputs[rank]).sum().backward()
        engine(inputs[rank]).sum().backward()
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        line = str(error).splitlines()[0]
        print(f"repro: REPRODUCED: {line}\n", end="", flush=True)
        return 1
    torch.testing.assert_close(model.weight.grad, wanted)
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
