"""A distributed checkpoint stores one buffer of a module from rank 0 and the next one from rank 1.

id: buffers-of-two-ranks
engine: fsdp2
symptom: after a load, every rank has rank 0's running mean and rank 1's running variance of a batch norm
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 2
law: state.resume
signature: and the variance that of rank
ok: repro: the buffers of a loaded checkpoint are those of one rank OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp2_noreport_buffers_of_two_ranks.py

A tensor that is not a DTensor is saved once for all ranks, by the rank that has the least to write so far
(`dedup_save_plans`, `torch/distributed/checkpoint/_dedup_save_plans.py`). If buffers differ between ranks, as running
statistics do, the checkpoint mixes the buffers of several ranks. `DefaultSavePlanner(dedup_save_to_lowest_rank=True)`
saves all of them from rank 0.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

OK = "repro: the buffers of a loaded checkpoint are those of one rank OK."


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def main():
    rank = start()
    model = nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2))
    fully_shard(model)
    mean, variance = model[0].running_mean, model[0].running_var
    mean.fill_(rank)
    variance.fill_(rank)
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)  # all ranks use rank 0's folder
        dcp.save(get_model_state_dict(model), checkpoint_id=folder[0])
        state = get_model_state_dict(model)
        dcp.load(state, checkpoint_id=folder[0])
        set_model_state_dict(model, state)
        dist.barrier()  # before rank 0 removes its folder
    found = int(model[0].running_mean[0]), int(model[0].running_var[0])
    if found[0] != found[1]:
        problem = f"the mean is that of rank {found[0]} and the variance that of rank {found[1]}"
        print(f"repro: REPRODUCED: {problem}\n", end="", flush=True)
        return 1
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
