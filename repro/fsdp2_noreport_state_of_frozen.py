"""set_state_dict does not load the optimizer state of a parameter that is frozen during the load.

id: state-of-frozen
engine: fsdp2
symptom: set_state_dict loads no moments of a parameter that is frozen during the load
reported: no report known
affects: ==2.13.0
fixed: not yet
ranks: 1
law: state.several_saves
signature: the load gives no optimizer state to
ok: repro: the optimizer state of a frozen parameter is loaded OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/fsdp2_noreport_state_of_frozen.py

The optimizer's own state_dict contains the state of a parameter that was trained before it was frozen.

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

SIGNATURE = "the load gives no optimizer state to"
OK = "repro: the optimizer state of a frozen parameter is loaded OK."


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def main():
    rank = start()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    frozen = model[0].weight.requires_grad_(False)
    assert "exp_avg" in optimizer.state[frozen]

    weights, state = get_state_dict(model, optimizer)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    if "exp_avg" not in optimizer.state[frozen]:
        print(f"repro: REPRODUCED: {SIGNATURE} 0.weight\n", end="", flush=True)
        return 1
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
