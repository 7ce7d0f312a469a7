"""engine.backward(loss, scale_wrt_gas=False) still divides by the accumulation steps.

id: 7724
engine: deepspeed
symptom: silent: DeepSpeed divides a loss that the caller has already divided (accelerate, with accumulation)
reported: https://github.com/huggingface/accelerate/issues/3877
affects: ==0.18.3
fixed: 0.18.4
broken: 0.18.3
ranks: 1
law: training.config_invariance
signature: the gradient was divided a second time
ok: repro: scale_wrt_gas=False OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_7724_unscaled_loss_divided.py

The hook that divides the gradients of a direct loss.backward() also divides the gradients of engine.backward().

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

SIGNATURE = "the gradient was divided a second time"
OK = "repro: scale_wrt_gas=False OK."

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}


def main():
    deepspeed.init_distributed()
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 1, device=engine.device)).sum() / 2, scale_wrt_gas=False)
        engine.step()
    used = -engine.module.weight.item()
    if used == 0.5:
        print(f"repro: REPRODUCED: {SIGNATURE}: {used} instead of 1.0\n", end="", flush=True)
        return 1
    assert used == 1.0, used
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
