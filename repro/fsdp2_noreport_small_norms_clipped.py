"""clip_grad_norm_ over the parameters of FSDP2 clips by another norm than the norm that it returns.

id: small-norms-clipped
engine: fsdp2
symptom: clip_grad_norm_ over sharded parameters scales by another factor than max_norm / (norm + 1e-6)
reported: no report known
affects: ==2.8.0
fixed: 2.13.0
broken: 2.8.0
ranks: 2
law: training.clip_and_norm
signature: is not the gradient times max_norm / (norm + 1e-6)
ok: repro: clip_grad_norm_ over sharded parameters OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp2_noreport_small_norms_clipped.py

The norm is a DTensor that is not yet reduced over the ranks when clip_grad_norm_ adds 1e-6 to it, so every rank adds
1e-6. For norms far above 1e-6 only the last bits differ; here the gradients are small.

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

SIGNATURE = "is not the gradient times max_norm / (norm + 1e-6)"
OK = "repro: clip_grad_norm_ over sharded parameters OK."


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def main():
    rank = start()
    assert dist.get_world_size() == 2, "this shows on 2 ranks"
    model = nn.Linear(2, 2, bias=False)
    fully_shard(model)

    # Rank r holds row r of the weight and of its gradient, (3, 0) and (0, 4), in millionths: the norm is 5.
    model(1e-6 * torch.eye(2)).sum().backward()
    local = model.weight.grad.to_local()
    local.copy_(1e-6 * torch.tensor([[3.0, 0.0], [0.0, 4.0]])[rank])
    gradient = model.weight.grad.full_tensor()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1e-6).full_tensor()
    factors = model.weight.grad.full_tensor().sum() / gradient.sum(), 1e-6 / (norm + 1e-6)
    told, wanted = (round(factor.item(), 4) for factor in factors)
    if told != wanted:
        print(f"repro: REPRODUCED: the gradient times {told} {SIGNATURE}, {wanted}\n", end="", flush=True)
        return 1
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
