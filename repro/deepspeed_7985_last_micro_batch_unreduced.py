"""BF16_Optimizer adds the last micro-batch's gradient after the reduction, so each rank steps with its own gradient.

id: 7985
engine: deepspeed
symptom: bf16 with grad_accum_dtype fp32 at ZeRO stage 1: the last micro-batch is not averaged over ranks
reported: https://github.com/deepspeedai/DeepSpeed/pull/7985
affects: ==0.18.6
fixed: 0.19.0
broken: 0.18.6
ranks: 2
law: training.accumulation
signature: each rank stepped its part by its own last micro-batch
ok: repro: a window in bf16 with fp32 accumulation OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_7985_last_micro_batch_unreduced.py

The engine reduces the fp32 sum first, and only then lets the optimizer add the gradients of the backward that has just
ended. Each rank owns a part of the weights, and steps this part with its own gradient of the last micro-batch.

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

SIGNATURE = "each rank stepped its part by its own last micro-batch"
OK = "repro: a window in bf16 with fp32 accumulation OK."

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {"stage": 1},
}


def main():
    deepspeed.init_distributed()
    rank = torch.distributed.get_rank()
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    for value in (2.0, 8.0):
        tokens = torch.full((1, 4), value * (1 + 2 * rank), dtype=torch.bfloat16, device=engine.device)
        engine.backward(engine(tokens).sum())
        engine.step()
    used = sorted(set((-engine.module.weight).flatten().tolist()))
    # The means over ranks are 4 and 16, and their mean over the window is 10. The last micro-batch alone is 8 or 24.
    if len(used) > 1 or used[0] != 10.0:
        print(f"repro: REPRODUCED: {SIGNATURE}: {used} instead of [10.0]\n", end="", flush=True)
        return 1
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
