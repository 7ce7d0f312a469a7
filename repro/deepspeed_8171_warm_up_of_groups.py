"""WarmupLR without warmup_max_lr warms up every parameter group to the learning rate of the first group.

id: 8171
engine: deepspeed
symptom: WarmupLR without warmup_max_lr gives all parameter groups the learning rate of group 0
reported: https://github.com/deepspeedai/DeepSpeed/pull/8171
affects: >=0.18.8,<=0.19.1
fixed: 0.19.4
broken: 0.19.1
ranks: 1
law: training.optimizer_options
signature: both groups have the rate of the first
ok: repro: WarmupLR with two rates OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_8171_warm_up_of_groups.py

WarmupLR reads the learning rates of all groups and keeps only the first one.

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

SIGNATURE = "both groups have the rate of the first"
OK = "repro: WarmupLR with two rates OK."

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0.0, "warmup_num_steps": 2, "warmup_type": "linear"},
    },
    "zero_optimization": {"stage": 1},
}


def main():
    deepspeed.init_distributed()
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    groups = [{"params": model[0].parameters(), "lr": 0.25}, {"params": model[1].parameters(), "lr": 0.5}]
    optimizer = torch.optim.SGD(groups)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    for _ in range(3):
        engine.backward(engine(torch.ones(1, 1, device=engine.device)).sum())
        engine.step()
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    if rates == [0.25, 0.25]:
        print(f"repro: REPRODUCED: {SIGNATURE}: {rates} instead of [0.25, 0.5]\n", end="", flush=True)
        return 1
    assert rates == [0.25, 0.5], rates
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
