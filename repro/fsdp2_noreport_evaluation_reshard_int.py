"""FSDP2 with reshard_after_forward=2 computes with old weights after an evaluation between backward and step.

id: evaluation-reshard-int
engine: fsdp2
symptom: with reshard_after_forward=2, a forward after backward, evaluation and step silently uses old weights
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 4
law: window.evaluated
signature: the forward used the weights from before the step
ok: repro: a forward after an evaluation with reshard_after_forward=2 and a step OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=4 repro/fsdp2_noreport_evaluation_reshard_int.py

The evaluation leaves copies of the weights, sharded over two ranks, from which a backward would gather them. The step
changes the shards over four ranks; the next forward gathers from the copies. With reshard_after_forward=True the
forward is right. To drop the copies after the evaluation, call reshard() of every module that fully_shard was applied
to (reshard() of the root reshards only its own group), or reset_iter_state() of the root.

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

SIGNATURE = "the forward used the weights from before the step"
OK = "repro: a forward after an evaluation with reshard_after_forward=2 and a step OK."


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def outputs(**options):
    """Return the output before and after one step of a sharded model, with an evaluation between backward and step."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 3.0)
    fully_shard(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.ones(1, 1)
    before = model(x)
    before.sum().backward()
    with torch.no_grad():
        model(x)
    optimizer.step()
    return before.item(), model(x).item()


def main():
    rank = start()
    before, wanted = outputs(reshard_after_forward=True)
    assert (before, wanted) == (3.0, 2.0), (before, wanted)
    _, got = outputs(reshard_after_forward=2)
    if got == before:
        print(f"repro: REPRODUCED: {SIGNATURE}: got {got}, expected {wanted}\n", end="", flush=True)
        return 1
    assert got == wanted, (got, wanted)
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
