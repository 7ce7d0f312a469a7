"""FSDP2 runs a backward on a graph from before a step with new weights, although PyTorch raises in this case.

id: step-between-backwards
engine: fsdp2
symptom: a backward on a retained graph after optimizer.step() gives a gradient of mixed weights instead of an error
reported: no report known
affects: >=2.8.0
fixed: not yet
ranks: 1
law: double_backward.step_between_retained_backwards
signature: a gradient of new weights and old activations
ok: repro: a backward over weights that a step has changed is refused OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/fsdp2_noreport_step_between_backwards.py

PyTorch raises "one of the variables needed for gradient computation has been modified by an inplace operation". FSDP2
gathers the new weights into the storages that the graph has saved, and preserves their version counters
(_unsafe_preserve_version_counter in _fsdp_collectives.py), so autograd does not notice the change.

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

SIGNATURE = "a gradient of new weights and old activations"
OK = "repro: a backward over weights that a step has changed is refused OK."
REFUSAL = "has been modified by an inplace operation"


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def second_gradient(model, x):
    """Return the first weight's gradient from a second backward after a step; None if that backward raises."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    try:
        loss.backward()
    except RuntimeError as error:
        if REFUSAL not in str(error):
            raise
        return None
    return model[0].weight.grad


def two_layers():
    """Return two layers with the weights 2 and 3.

    The output is 6 x, the gradients are 3 x and 2 x, and the weights after a step are 2 - 3 x and 3 - 2 x.
    """
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    nn.init.constant_(model[0].weight, 2.0)
    nn.init.constant_(model[1].weight, 3.0)
    return model


def main():
    rank = start()
    x = torch.ones(1, 1)
    assert second_gradient(two_layers(), x) is None, "plain PyTorch refuses it"

    model = two_layers()
    fully_shard(model)
    got = second_gradient(model, x)
    if got is not None:
        torch.testing.assert_close(got.full_tensor(), torch.full((1, 1), 3.0 - 2.0))
        print(f"repro: REPRODUCED: {SIGNATURE}: {got.full_tensor().item()}, no error\n", end="", flush=True)
        return 1
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
