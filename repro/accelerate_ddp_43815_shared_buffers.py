"""On a CPU, accelerate's prepare() gives each of two modules that share a buffer its own copy of the buffer.

id: shared-buffers
engine: accelerate_ddp
symptom: after Accelerator.prepare on a CPU, two modules no longer share their common buffer
reported: https://github.com/pytorch/pytorch/issues/43815
affects: ==1.15.0
fixed: not yet
ranks: 2
law: state.buffer_kinds
signature: two modules have a copy each
ok: repro: the modules still share their buffer OK.

Run it with nothing but torch and accelerate installed:

    torchrun --standalone --nproc_per_node=2 repro/accelerate_ddp_43815_shared_buffers.py

On a CPU the device of an Accelerator is cpu:0, not cpu, so prepare moves a model that is already on the CPU. Module.to
copies each buffer that it moves and does not remember the buffers that it has moved before. A cache or a table that two
modules share becomes two tensors, and an update of one tensor does not reach the other.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

SIGNATURE = "two modules have a copy each"
OK = "repro: the modules still share their buffer OK."


def main():
    accelerator = Accelerator(cpu=True)
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    first.register_buffer("table", torch.zeros(1))
    second.register_buffer("table", first.table)
    model = accelerator.prepare(nn.Sequential(first, second)).module
    model[0].table.add_(1)
    if torch.equal(model[0].table, model[1].table):
        print(OK, flush=True)
        return 0
    line = f"of the shared buffer {SIGNATURE}, on {accelerator.device}"
    print(f"repro: REPRODUCED: {line}\n", end="", flush=True)
    return 1


if __name__ == "__main__":
    code = main()
    dist.destroy_process_group()
    sys.exit(code)
