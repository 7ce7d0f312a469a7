"""DDP does not reduce the gradients of a second backward on a retained graph.

id: 47260
engine: ddp
symptom: after zero_grad, a second backward on a retained graph silently leaves each rank with its own gradient
reported: https://github.com/pytorch/pytorch/issues/47260
affects: >=2.8.0
fixed: not yet
ranks: 2
law: double_backward.retained_then_zero_grad
signature: the gradient of this rank alone, not reduced
ok: repro: a second backward on a retained graph is reduced OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/ddp_47260_second_backward_unreduced.py

DDP prepares its reducer once, at the end of its forward. The second backward finds the reducer already finished. The
same happens with two forwards followed by both backwards, as in training with several losses. If a parameter gets no
gradient, the second backward raises "Expected to mark a variable ready only once" instead; with
find_unused_parameters=True the failure is silent.

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

SIGNATURE = "the gradient of this rank alone, not reduced"
OK = "repro: a second backward on a retained graph is reduced OK."


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def main():
    rank = start()
    assert dist.get_world_size() > 1, "one rank has nothing to reduce"
    model = nn.Linear(1, 1, bias=False)
    inputs = [torch.full((1, 1), each + 1.0) for each in range(dist.get_world_size())]
    alone = [torch.autograd.grad(model(x).sum(), model.weight)[0] for x in inputs]
    wanted = torch.stack(alone).mean(0)

    engine = DistributedDataParallel(model)
    loss = engine(inputs[rank]).sum()
    loss.backward(retain_graph=True)
    engine.zero_grad()
    loss.backward()
    got = model.weight.grad
    if torch.equal(got, alone[rank]):
        print(f"repro: REPRODUCED: {SIGNATURE}: got {got.item()}, expected {wanted.item()}\n", end="", flush=True)
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
