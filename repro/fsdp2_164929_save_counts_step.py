"""Saving a checkpoint before the first step makes the optimizer count one step.

id: 164929
engine: fsdp2
symptom: get_state_dict before the first step leaves Adam's step count at 1, so Adam corrects its update for two steps
reported: https://github.com/pytorch/pytorch/issues/164929
affects: >=2.8.0
fixed: not yet
ranks: 1
law: state.resume
signature: the step count of a second step
ok: repro: a save before the first step OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/fsdp2_164929_save_counts_step.py

torch.distributed.checkpoint.state_dict makes the optimizer's state by a step on zero gradients (_init_optim_state), and
does not reset the step count: the first update is 0.744 of the right update.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

SIGNATURE = "the step count of a second step"
OK = "repro: a save before the first step OK."


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def layer():
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


def train(model, optimizer, x):
    """Run one step; return the optimizer's step count and the weight after the step."""
    model(x).sum().backward()
    optimizer.step()
    return optimizer.state[model.weight]["step"].item(), model.weight


def main():
    rank = start()
    x = torch.ones(1, 1)
    plain, model = layer(), layer()
    count, wanted = train(plain, torch.optim.AdamW(plain.parameters(), lr=0.5), x)

    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    get_state_dict(model, optimizer)
    steps, weight = train(model, optimizer, x)
    if steps == count + 1:
        moved = f"weight {weight.full_tensor().item()}, expected {wanted.item()}"
        print(f"repro: REPRODUCED: {SIGNATURE}: {moved}\n", end="", flush=True)
        return 1
    assert steps == count, f"the optimizer counts {steps} steps"
    torch.testing.assert_close(weight.full_tensor(), wanted)
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
