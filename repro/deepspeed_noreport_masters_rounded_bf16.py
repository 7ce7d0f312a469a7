"""The optimizer's fp32 master weights start as the model's fp32 weights rounded to bf16.

id: masters-rounded-bf16
engine: deepspeed
symptom: training in bf16 from fp32 weights starts from rounded weights instead of the fp32 weights
reported: no report known
affects: >=0.16.4
fixed: not yet
ranks: 1
law: training.free_running
signature: the fp32 weight is 256.0 before the first step
ok: repro: under bf16 at ZeRO stage 1 the optimizer starts from the fp32 weights that the model had OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_masters_rounded_bf16.py

DeepSpeed converts the model to bf16 first, and makes the optimizer's fp32 copy from the bf16 weights. Stage 2 does the
same.

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
from deepspeed.utils import safe_get_full_fp32_param

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "the fp32 weight is 256.0 before the first step"
OK = "repro: under bf16 at ZeRO stage 1 the optimizer starts from the fp32 weights that the model had OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
}


def main():
    deepspeed.init_distributed()
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 257.0)  # bf16 can represent 256 and 258
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    found = safe_get_full_fp32_param(engine.module.weight).item()
    told = f"the fp32 weight is {found} before the first step; the model's was 257.0"
    if SIGNATURE in told:
        print(f"repro: REPRODUCED: {told}\n", end="", flush=True)
        return 1
    assert found == 257.0, told
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
