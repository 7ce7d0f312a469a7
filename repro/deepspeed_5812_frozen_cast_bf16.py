"""The bf16 section rounds a frozen parameter in fp32 to bf16.

id: 5812-frozen
engine: deepspeed
symptom: a frozen parameter in fp32 is bf16 after deepspeed.initialize, its value rounded
reported: https://github.com/deepspeedai/DeepSpeed/issues/5812
affects: >=0.16.4
fixed: not yet
ranks: 1
law: precision.buffers_keep_dtype
signature: the frozen parameter is 256.0 in torch.bfloat16
ok: repro: a frozen parameter in fp32 keeps dtype and value under bf16 at ZeRO stage 1 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_5812_frozen_cast_bf16.py

Every parameter is converted, a frozen one too, which no optimizer works on and of which no fp32 copy is kept; the list
`keep_in_fp32_modules` of 0.19.8 names buffers alone. The same of buffers: deepspeed_5812_buffer_cast_bf16.py.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither.
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

# Saves compiling an all-reduce in shared memory, for which the ranks would race; plain gloo does as well.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "the frozen parameter is 256.0 in torch.bfloat16"
OK = "repro: a frozen parameter in fp32 keeps dtype and value under bf16 at ZeRO stage 1 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
}


def main():
    deepspeed.init_distributed()
    model = nn.Linear(2, 1)
    model.positions = nn.Parameter(torch.tensor([257.0]), requires_grad=False)
    optimizer = torch.optim.SGD([model.weight, model.bias], lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    found = engine.module.positions.detach()
    told = f"the frozen parameter is {found.item()} in {found.dtype} after initialize; it was 257.0 in torch.float32"
    if SIGNATURE in told:
        print(f"repro: REPRODUCED: {told}\n", end="", flush=True)
        return 1
    assert (found.dtype, found.item()) == (torch.float32, 257.0), told
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
