"""At ZeRO stage 2, DeepSpeed rounds gradients that accumulate in fp32 to bf16 before it reduces them.

id: fp32-sums-rounded
engine: deepspeed
symptom: at stage 2 with data_types.grad_accum_dtype fp32 a step uses a sum of micro-batches rounded to bf16
reported: no report known
affects: >=0.19.0,<=0.19.7
fixed: 0.19.8
broken: 0.19.5
ranks: 1
law: precision.master_weights
signature: the step used 128.0
ok: repro: the step uses the fp32 sum of micro-batches at ZeRO stage 2 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_fp32_sums_rounded.py

The gradients of two micro-batches are 128 and 0.5. fp32 can hold their sum and bf16 cannot. DeepSpeed rounds the sum
when the reduction fetches it (`get_gradient_for_reduction`, `runtime/zero/stage_1_and_2.py`), with any
communication_data_type. At stage 1 BF16_Optimizer reduces the gradients, and communication_data_type fp32 keeps the
sum.

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

SIGNATURE = "the step used 128.0"
OK = "repro: the step uses the fp32 sum of micro-batches at ZeRO stage 2 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "communication_data_type": "fp32",
    "zero_optimization": {"stage": 2},
}


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = nn.Linear(1, 1, bias=False).to(device)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    for value in (256.0, 1.0):  # the engine divides by the number of micro-batches
        engine.backward(engine(torch.full((1, 1), value, device=device, dtype=torch.bfloat16)).sum())
        engine.step()
    used = -safe_get_full_fp32_param(engine.module.weight).item()
    if used == 128.0:
        print(f"repro: REPRODUCED: {SIGNATURE}, not 128.5\n", end="", flush=True)
        return 1
    assert used == 128.5, used
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
