"""FSDP2 hangs when it makes its reduce-scatter group, if the ranks are members of different numbers of groups.

id: 173608
engine: fsdp2
symptom: set_separate_reduce_scatter_group(True) does not return if only some ranks are members of an earlier group
reported: https://github.com/pytorch/pytorch/issues/173608
affects: >=2.13.0
fixed: not yet
ranks: 2
law: state.other_world_size
signature: the group for the reduce-scatter was not made
ok: repro: a reduce-scatter in a group of its own, after a group of one rank OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp2_173608_group_of_some_ranks.py

new_group(..., use_local_synchronization=True) names the group by a hash of its ranks and of the number of groups that
this rank is in (_hash_ranks_to_str). Here rank 0 is in one group more than rank 1. Each rank then waits in the store
for the other rank under a name that the other rank does not use. With a second group, of rank 1, the ranks agree.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import os
import sys
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

SIGNATURE = "the group for the reduce-scatter was not made"
OK = "repro: a reduce-scatter in a group of its own, after a group of one rank OK."
SECONDS = 20


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def main():
    rank = start()
    dist.new_group([0])
    model = fully_shard(nn.Linear(2, 1, bias=False))
    made = threading.Thread(target=model.set_separate_reduce_scatter_group, args=(True,), daemon=True)
    made.start()
    made.join(SECONDS)
    if made.is_alive():
        print(f"repro: REPRODUCED: {SIGNATURE} {SECONDS} seconds later on rank {rank}\n", end="", flush=True)
        os._exit(1)  # the thread waits until the process group's timeout, half an hour
    model(torch.ones(1, 2)).sum().backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), torch.ones(1, 2))
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
