"""A DeepSpeed learning rate schedule replaces a learning rate tensor by a new tensor.

id: 8202
engine: deepspeed
symptom: silent: a learning rate tensor that the caller holds no longer controls the optimizer
reported: https://github.com/deepspeedai/DeepSpeed/pull/8202
affects: >=0.16.4,<=0.19.3
fixed: 0.19.4
broken: 0.19.1
ranks: 1
law: training.optimizer_options
signature: the optimizer has another tensor
ok: repro: a schedule writes the caller's rate tensor OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_8202_rate_tensor_replaced.py

Each update builds a new fp32 tensor of one dimension from the learning rate. torch's schedulers write into the existing
tensor.

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

SIGNATURE = "the optimizer has another tensor"
OK = "repro: a schedule writes the caller's rate tensor OK."

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.5, "warmup_num_steps": 2, "warmup_type": "linear"},
    },
    "zero_optimization": {"stage": 1},
}


def main():
    deepspeed.init_distributed()
    model = nn.Linear(1, 1, bias=False)
    rate = torch.tensor(0.5, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    got = engine.optimizer.param_groups[0]["lr"]
    if got is not rate:
        print(f"repro: REPRODUCED: {SIGNATURE}: {got!r} instead of {rate!r}\n", end="", flush=True)
        return 1
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
