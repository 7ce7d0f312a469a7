"""FSDP2 computes with old weights after an evaluation between backward and step.

id: step-after-evaluation
engine: fsdp2
symptom: after backward, evaluation and step, the next forward silently uses the weights from before the step
reported: no report known
affects: >=2.8.0
fixed: not yet
ranks: 1
law: training.forward_alone
signature: the forward used the weights from before the step
ok: repro: a forward after an evaluation and a step OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/fsdp2_noreport_step_after_evaluation.py

With reshard_after_forward=False, which is the default of the root, the weights that the evaluation gathered stay until
a backward frees them. The step changes the shards; the next forward finds gathered weights and gathers none. To free
them after the evaluation, call reshard() of every module that fully_shard was applied to (reshard() of the root
reshards only its own group), or reset_iter_state() of the root.

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
OK = "repro: a forward after an evaluation and a step OK."


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def outputs(model, x):
    """Return the output before and after one step, with an evaluation between backward and step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model(x)
    before.sum().backward()
    with torch.no_grad():
        model(x)
    optimizer.step()
    return before.detach(), model(x).detach()


def layer():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 3.0)
    return model


def main():
    rank = start()
    x = torch.ones(1, 1)
    before, wanted = outputs(layer(), x)

    model = layer()
    fully_shard(model)
    _, got = outputs(model, x)
    if torch.equal(got, before):
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
