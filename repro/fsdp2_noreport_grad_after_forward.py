"""torch.func transforms that compute gradients raise over FSDP2 after its first forward.

id: grad-after-forward
engine: fsdp2
symptom: after a forward, torch.func.grad over a sharded model raises "must override the setup_context staticmethod"
reported: no report known
affects: ==2.8.0
fixed: 2.13.0
broken: 2.8.0
ranks: 1
law: torch_func.through_transforms
signature: must override the setup_context staticmethod
ok: repro: torch.func.grad over FSDP2 after a forward OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/fsdp2_noreport_grad_after_forward.py

Once the buffers for gathered weights exist, a transform does not raise the error of #182641. It then reaches the
autograd Function that FSDP2 puts around a module's inputs (RegisterPostBackwardFunction), which has no setup_context.

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

SIGNATURE = "must override the setup_context staticmethod"
OK = "repro: torch.func.grad over FSDP2 after a forward OK."


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def main():
    rank = start()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    x = torch.ones(1, 2)
    wanted = torch.func.grad(lambda inputs: model(inputs).sum())(x)

    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model(x).sum().backward()
    try:
        got = torch.func.grad(lambda inputs: model(inputs).sum())(x)
    except RuntimeError as error:
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
