"""set_state_dict raises for a checkpoint in which a parameter has no optimizer state yet.

id: 192202
engine: fsdp2
symptom: set_state_dict raises for a checkpoint that was saved before a parameter had its first gradient
reported: https://github.com/pytorch/pytorch/issues/192202
affects: ==2.13.0
fixed: not yet
ranks: 1
law: state.resume
signature: The parameter requires gradients but has no saved optimizer state
ok: repro: a checkpoint before a parameter's first gradient OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/fsdp2_192202_never_had_gradient.py

Optimizers make a parameter's state when the parameter has its first gradient. torch.distributed.checkpoint.state_dict
makes missing state by a step on zero gradients (_init_optim_state), but only for an optimizer that has no state at all.
For an optimizer that has some state, get_state_dict leaves the parameter out, and set_state_dict demands it.
torch.optim's own load_state_dict does not demand it. torch 2.8.0 raises KeyError: 'unused.weight' instead.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

SIGNATURE = "The parameter requires gradients but has no saved optimizer state"
OK = "repro: a checkpoint before a parameter's first gradient OK."


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


class Model(nn.Module):
    """Two layers; the loss uses only the first layer."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = (nn.Linear(2, 2, bias=False) for _ in range(2))

    def forward(self, x):
        return self.used(x).sum()


def sharded():
    """Return a new model and its optimizer."""
    model = Model()
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters())


def main():
    rank = start()
    model, optimizer = sharded()
    model(torch.ones(1, 2)).backward()
    optimizer.step()
    optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)

    resumed, fresh = sharded()
    try:
        set_state_dict(resumed, fresh, model_state_dict=weights, optim_state_dict=state)
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    for ours, theirs in zip(resumed.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs.full_tensor())
    moments = (each.state[layer.used.weight]["exp_avg"] for layer, each in ((resumed, fresh), (model, optimizer)))
    torch.testing.assert_close(*(moment.full_tensor() for moment in moments))
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
