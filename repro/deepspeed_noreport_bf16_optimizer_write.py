"""BF16_Optimizer ignores a gradient that the caller wrote by safe_set_full_grad.

id: bf16-optimizer-write
engine: deepspeed
symptom: with fp32 gradient accumulation, a gradient that safe_set_full_grad wrote has no effect on the step
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 1
law: access.write_grad
signature: the step used the old gradient
ok: repro: under bf16 with fp32 gradient accumulation the step uses the gradient that safe_set_full_grad wrote OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_bf16_optimizer_write.py

The optimizer accumulates gradients in fp32 buffers, but safe_set_full_grad writes to param.grad, which still exists.
safe_get_full_grad reads the buffer, so it does not return the written gradient either.

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
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_grad

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "the step used the old gradient"
OK = "repro: under bf16 with fp32 gradient accumulation the step uses the gradient that safe_set_full_grad wrote OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0.0,
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {"stage": 1},
}


def main():
    deepspeed.init_distributed()
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 16.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    engine.backward(engine(torch.ones(1, 1, device=engine.device, dtype=torch.bfloat16)).sum())
    safe_set_full_grad(engine.module.weight, torch.full((1, 1), 8.0, device=engine.device))
    engine.step()
    found = safe_get_full_fp32_param(engine.module.weight).item()
    if found == 16.0 - 1.0:
        print(f"repro: REPRODUCED: {SIGNATURE}: the weight is {found}, expected {16.0 - 8.0}\n", end="", flush=True)
        return 1
    assert found == 16.0 - 8.0, found
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
