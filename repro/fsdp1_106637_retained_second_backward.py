"""FSDP1 frees the weights that a second backward on a retained graph needs.

id: 106637
engine: fsdp1
symptom: a second backward on a retained graph finds a storage of size 0
reported: https://github.com/pytorch/pytorch/issues/106637
affects: >=2.8.0
fixed: not yet
ranks: 2
law: double_backward.retained_then_zero_grad
signature: out of bounds for storage of size 0
ok: repro: a second backward on a retained graph OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp1_106637_retained_second_backward.py

The end of the first backward frees the gathered weights, although retain_graph=True says that they are needed again. On
one rank FSDP1 shards nothing and frees nothing.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

SIGNATURE = "out of bounds for storage of size 0"
OK = "repro: a second backward on a retained graph OK."


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def main():
    rank = start()
    assert dist.get_world_size() > 1, "with one rank nothing is sharded"
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    x = torch.ones(1, 2)
    wanted = torch.autograd.grad(model(x).sum(), list(model.parameters()))

    engine = FullyShardedDataParallel(model, use_orig_params=True, device_id=x.device)
    loss = engine(x).sum()
    loss.backward(retain_graph=True)
    engine.zero_grad()
    try:
        loss.backward()
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    with FullyShardedDataParallel.summon_full_params(engine, with_grads=True):
        torch.testing.assert_close([param.grad for param in model.parameters()], list(wanted))
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
