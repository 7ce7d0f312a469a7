"""FSDP2's reset_iter_state() raises before the first forward.

id: reset-before-forward
engine: fsdp2
symptom: reset_iter_state() before the first forward raises an AttributeError
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 1
law: state.buffer_kinds
signature: all_gather_state
ok: repro: a reset before the first forward OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/fsdp2_noreport_reset_before_forward.py

reset_iter_state() reads attributes that only the first forward creates. After a forward and a backward it works.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

OK = "repro: a reset before the first forward OK."


def observe(_rank):
    model = fully_shard(nn.Linear(2, 2))
    try:
        model.reset_iter_state()
    except AttributeError as error:
        if "all_gather_state" not in str(error):
            raise
        return str(error)
    return ""


def main():
    dist.init_process_group("gloo")
    problem = observe(dist.get_rank())
    if problem:
        print(f"repro: REPRODUCED: {problem}\n", end="", flush=True)
        return 1
    if dist.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
