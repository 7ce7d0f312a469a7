"""Under torch_autocast in fp16 safe_get_full_grad returns the gradient of the scaled loss.

id: autocast-grad-scaled
engine: deepspeed
symptom: a gradient that safe_get_full_grad reads before the step is 65536 times too large
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 1
law: access.read_scaled_grad
signature: the gradient is 4096.0 before the step
ok: repro: under torch_autocast in fp16 safe_get_full_grad returns the unscaled gradient OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_autocast_grad_scaled.py

A torch.amp.GradScaler that DeepSpeed owns scales the loss, and the step divides by the scale. A caller of
safe_get_full_grad cannot see that the gradient is scaled. Stages 2 and 3 do the same.

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
from deepspeed.utils import safe_get_full_grad

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "the gradient is 4096.0 before the step"
OK = "repro: under torch_autocast in fp16 safe_get_full_grad returns the unscaled gradient OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "torch_autocast": {"enabled": True, "dtype": "float16"},
    "zero_optimization": {"stage": 1},
}


def main():
    deepspeed.init_distributed()
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    output = engine(torch.ones(1, 1, device=engine.device))
    engine.backward(output.float().sum() / 16)  # 65536, the scale, overflows to infinity in fp16
    found = safe_get_full_grad(engine.module.weight).item()
    seen = f"the gradient is {found} before the step; expected 0.0625"
    if SIGNATURE in seen:
        print(f"repro: REPRODUCED: {seen}\n", end="", flush=True)
        return 1
    assert found == 0.0625, seen
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
