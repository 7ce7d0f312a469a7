"""torch.optim.Rprop cannot step the parameters of FSDP2.

id: rprop-mask-assignment
engine: fsdp2
symptom: the first step of torch.optim.Rprop over sharded parameters raises a RuntimeError of DTensor
reported: no report known
affects: ==2.13.0
fixed: 2.15.0
ranks: 1
law: training.optimizers
signature: aten.index_put_.default: in-place operations that require placement changes are not supported
ok: repro: a step of Rprop over sharded parameters OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/fsdp2_noreport_rprop_mask_assignment.py

Rprop assigns by a mask (sign[sign.gt(0)] = etaplus), and DTensor has no rule that keeps the shard in such an
assignment. Torch's ten other elementwise optimizers work. 2.8.0 raises "got mixed torch.Tensor and DTensor" instead.

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

SIGNATURE = "aten.index_put_.default: in-place operations that require placement changes are not supported"
OK = "repro: a step of Rprop over sharded parameters OK."


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def step(model, x):
    optimizer = torch.optim.Rprop(model.parameters())
    model(x).sum().backward()
    optimizer.step()


def main():
    rank = start()
    x = torch.ones(1, 2)
    models = [nn.Linear(2, 2, bias=False) for _ in range(2)]
    for model in models:
        nn.init.ones_(model.weight)
    plain, sharded = models
    step(plain, x)

    fully_shard(sharded)
    try:
        step(sharded, x)
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    torch.testing.assert_close(sharded.weight.full_tensor(), plain.weight)
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
