"""With a DeepSpeedPlugin on a CPU, accelerate counts one process on every rank, so each rank trains on all samples.

id: deepspeed-of-one-process
engine: accelerate_ddp
symptom: with a DeepSpeedPlugin on a CPU every rank is process 0 of 1, and its data loader yields all samples
reported: no report known
affects: ==1.15.0
fixed: not yet
ranks: 2
law: loop.training
signature: a rank got
ok: repro: each rank got its own samples OK.

Run it with nothing but torch, deepspeed and accelerate installed:

    torchrun --standalone --nproc_per_node=2 repro/accelerate_ddp_noreport_deepspeed_of_one_process.py

PartialState initializes deepspeed.comm over all ranks. But on a CPU PartialState has no backend, so it takes the branch
for no distributed training: num_processes is 1 and process_index 0 (state.py). distributed_type is still DEEPSPEED, and
DeepSpeed averages gradients over both ranks. With cpu=True accelerate drops the plugin without a warning, and prepare
returns DistributedDataParallel.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from torch import nn
from torch.utils.data import DataLoader

SIGNATURE = "a rank got"
OK = "repro: each rank got its own samples OK."
SAMPLES = 4


def main() -> int:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
    }
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = nn.Linear(1, 1)
    loader = DataLoader(torch.arange(float(SAMPLES)).unsqueeze(1), batch_size=1)
    model, _, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), loader)
    got = len(list(loader))
    ranks = dist.get_world_size()
    if got != SAMPLES // ranks:
        where = f"of {ranks} ranks of {type(model).__name__}, and counts {accelerator.num_processes} process"
        print(f"repro: REPRODUCED: {SIGNATURE} {got} of {SAMPLES} samples {where}\n", end="", flush=True)
        return 1
    if dist.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
