"""With an FSDP2 plugin on a CPU, accelerate makes no process group, and each rank trains a plain model on all samples.

id: fsdp-plugin-of-one-process
engine: accelerate_ddp
symptom: with an FSDP2 plugin on a CPU every rank is process 0 of 1, without a process group, and trains a plain model
reported: no report known
affects: ==1.15.0
fixed: not yet
ranks: 2
law: loop.training
signature: counts 1 process
ok: repro: the ranks train together OK.

Run it with nothing but torch and accelerate installed:

    torchrun --standalone --nproc_per_node=2 repro/accelerate_ddp_noreport_fsdp_plugin_of_one_process.py

Without cpu=True PartialState looks for a backend of an accelerator, finds none, and takes the branch for no distributed
training, although torchrun started several ranks (state.py). accelerate drops the plugin without a warning, prepare
returns the model unchanged, and each rank trains on all samples.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import os
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn

SIGNATURE = "counts 1 process"
OK = "repro: the ranks train together OK."


def main() -> int:
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = nn.Linear(1, 1)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    if accelerator.num_processes == 1:
        where = f"on each of {os.environ['WORLD_SIZE']} ranks, with {accelerator.distributed_type} and a plain"
        print(f"repro: REPRODUCED: {SIGNATURE} {where} {type(model).__name__}\n", end="", flush=True)
        return 1
    if accelerator.is_main_process:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if dist.is_initialized() and status == 0:
        dist.destroy_process_group()
    sys.exit(status)
