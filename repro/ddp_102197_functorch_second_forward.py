"""A torch.func transform over DDP crashes if its forward is the first one after a backward.

id: functorch-second-forward
engine: ddp
symptom: torch.func.grad over DDP raises RuntimeError in the forward after the first backward
reported: https://github.com/pytorch/pytorch/issues/102197
affects: >=2.13.0
fixed: not yet
ranks: 1
law: training.any_order
signature: Cannot access data pointer of Tensor that doesn't have storage
ok: repro: torch.func.grad behind the first backward OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/ddp_102197_functorch_second_forward.py

The forward after the first backward rebuilds DDP's gradient buckets. Within a transform, the tensors that this rebuild
creates are wrapped and have no memory of their own. In the first forward, and from the third forward on, the same
transform is right.

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

SIGNATURE = "Cannot access data pointer of Tensor that doesn't have storage"
OK = "repro: torch.func.grad behind the first backward OK."


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
    wanted = torch.func.grad(lambda inputs: model(inputs).sum())(x).detach()

    engine = DistributedDataParallel(model)
    engine(x).sum().backward()
    try:
        got = torch.func.grad(lambda inputs: engine(inputs).sum())(x).detach()
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
