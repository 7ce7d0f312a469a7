"""A torch.func transform over DDP crashes if the model has a buffer.

id: functorch-buffers
engine: ddp
symptom: torch.func.grad over DDP of a model with a buffer raises RuntimeError
reported: https://github.com/pytorch/pytorch/issues/102197
affects: >=2.13.0
fixed: not yet
ranks: 2
law: precision.autocast_policy
signature: attempted to call in-place operation (aten::copy_) that would mutate a captured Tensor
ok: repro: torch.func.grad over a model with a buffer OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/ddp_102197_functorch_buffers.py

Before a forward DDP copies the buffers of rank 0 into the buffers of the model. A transform refuses a copy into a
tensor that was created outside its function. With broadcast_buffers=False, or on one rank, the transform is right.

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

SIGNATURE = "attempted to call in-place operation (aten::copy_) that would mutate a captured Tensor"
OK = "repro: torch.func.grad over a model with a buffer OK."


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
    model.register_buffer("count", torch.zeros(1))
    inputs = torch.ones(1, 2)
    wanted = torch.func.grad(lambda x: model(x).sum())(inputs)
    engine = DistributedDataParallel(model)
    try:
        got = torch.func.grad(lambda x: engine(x).sum())(inputs)
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {SIGNATURE}\n", end="", flush=True)
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
