"""WarmupCosineLR does not warm up the first step of any parameter group but the first.

id: 7969
engine: deepspeed
symptom: WarmupCosineLR: all parameter groups but the first take their first step at the full learning rate
reported: https://github.com/deepspeedai/DeepSpeed/pull/7969
affects: >=0.17.6,<=0.18.6
fixed: 0.19.0
broken: 0.18.6
ranks: 1
law: training.optimizer_options
signature: the rate of the second group does not warm up
ok: repro: WarmupCosineLR with two groups OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_7969_cosine_of_groups.py

Before the first step WarmupCosineLR returns one learning rate for all groups, and its zip with the groups ends after
the first group.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import importlib
import os
import sys

import torch
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))  # DeepSpeed's CPU accelerator asks for it

import deepspeed

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "the rate of the second group does not warm up"
OK = "repro: WarmupCosineLR with two groups OK."

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 10, "warmup_num_steps": 4},
    },
    "zero_optimization": {"stage": 1},
}


def main():
    deepspeed.init_distributed()
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    groups = [{"params": model[0].parameters(), "lr": 0.25}, {"params": model[1].parameters(), "lr": 0.5}]
    optimizer = torch.optim.SGD(groups)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    if rates == [0.0, 0.5]:
        print(f"repro: REPRODUCED: {SIGNATURE}: {rates} instead of [0.0, 0.0]\n", end="", flush=True)
        return 1
    assert rates == [0.0, 0.0], rates
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
