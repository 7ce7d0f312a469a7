"""BF16_Optimizer adds the gradient of a forward's first loss again when a second loss of this forward runs backward.

id: bf16-optimizer-added-again
engine: deepspeed
symptom: with fp32 gradient accumulation and two losses on one forward, the first loss counts twice
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 1
law: training.several_backwards
signature: the first loss counts twice
ok: repro: under bf16 with fp32 gradient accumulation each of two losses on one forward counts once OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_bf16_optimizer_added_again.py

After each backward the optimizer adds param.grad to its fp32 buffer. A hook on the engine's output clears param.grad
before a backward, but this hook runs once for each forward. At a second backward of one forward param.grad still holds
the first backward's gradient. With a forward before each backward, or with immediate_grad_update, which drops
param.grad at once, the sum is right.

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

SIGNATURE = "the first loss counts twice"
OK = "repro: under bf16 with fp32 gradient accumulation each of two losses on one forward counts once OK."
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
    output = engine(torch.ones(1, 1, device=engine.device, dtype=torch.bfloat16)).sum()
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(output, retain_graph=True)
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(2 * output)
    engine.step()
    found = safe_get_full_fp32_param(engine.module.weight).item()
    if found == 16.0 - (1.0 + 1.0 + 2.0):
        print(f"repro: REPRODUCED: {SIGNATURE}: the weight is {found}, expected {16.0 - 3.0}\n", end="", flush=True)
        return 1
    assert found == 16.0 - 3.0, found
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
