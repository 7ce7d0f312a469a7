"""With the bf16 section, deepspeed.initialize rounds a frozen fp32 parameter to bf16.

id: 5812-frozen
engine: deepspeed
symptom: after deepspeed.initialize a frozen fp32 parameter is bf16, and its value is rounded
reported: https://github.com/deepspeedai/DeepSpeed/issues/5812
affects: >=0.16.4
fixed: not yet
ranks: 1
law: precision.buffers_keep_dtype
signature: the frozen parameter is 256.0 in torch.bfloat16
ok: repro: a frozen parameter in fp32 keeps dtype and value under bf16 at ZeRO stage 1 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_5812_frozen_cast_bf16.py

DeepSpeed converts every parameter, including frozen ones. No optimizer works on a frozen parameter, and DeepSpeed keeps
no fp32 copy of it. The list `keep_in_fp32_modules` of 0.19.8 names buffers only. deepspeed_5812_buffer_cast_bf16.py
shows the same for buffers.

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
