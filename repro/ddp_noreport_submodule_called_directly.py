"""DDP does not reduce the gradients of a submodule that is called directly, without DDP's own forward.

id: submodule-called-directly
engine: ddp
symptom: if the caller calls a layer of the wrapped model directly, each rank silently keeps its own gradient
reported: no report known
affects: >=2.8.0
fixed: not yet
ranks: 2
law: checkpointing.plain_inputs
signature: the gradient of this rank alone, not reduced
ok: repro: a layer that is called without the wrapper's forward OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/ddp_noreport_submodule_called_directly.py

DDP's forward prepares the reducer, so DDP does not reduce in a backward without an earlier forward of DDP. The same
happens with find_unused_parameters=True and with static_graph=True.

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
OK = "repro: a layer that is called without the wrapper's forward OK."


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
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    (layer,) = model
    inputs = [torch.full((1, 1), each + 1.0) for each in range(dist.get_world_size())]
    alone = [torch.autograd.grad(layer(x).sum(), layer.weight)[0] for x in inputs]
    wanted = torch.stack(alone).mean(0)

    engine = DistributedDataParallel(model)
    engine.module[0](inputs[rank]).sum().backward()
    got = layer.weight.grad
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
