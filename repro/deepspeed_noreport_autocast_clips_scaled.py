"""Under torch_autocast in fp16 ZeRO clips the gradient of the scaled loss and unscales the gradient afterwards.

id: autocast-clips-scaled-gradient
engine: deepspeed
symptom: with gradient_clipping, a step uses a gradient whose norm is at most 1/65536 of the limit
reported: no report known
affects: >=0.17.6
fixed: not yet
ranks: 1
law: precision.grad_scaler
signature: the step is 1.52587890625e-05 with the norm 4096.0
ok: repro: under torch_autocast in fp16 ZeRO clips the unscaled gradient OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_autocast_clips_scaled.py

A torch.amp.GradScaler that DeepSpeed owns scales the loss. `step()` (`runtime/zero/stage_1_and_2.py`) computes the norm
of the scaled gradients and divides this norm by `loss_scale`, which is 1 here. GradScaler.step divides the clipped
gradient by 65536. Stages 2 and 3 do the same.

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

SIGNATURE = "the step is 1.52587890625e-05 with the norm 4096.0"
OK = "repro: under torch_autocast in fp16 ZeRO clips the unscaled gradient OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,
    "torch_autocast": {"enabled": True, "dtype": "float16"},
    "zero_optimization": {"stage": 1},
}


def main():
    deepspeed.init_distributed()
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)  # so that no bit of the step is lost
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    before = engine.module.weight.item()
    output = engine(torch.ones(1, 1, device=engine.device))
    engine.backward(output.float().sum() / 16)  # 65536, the scale, overflows to infinity in fp16
    engine.step()
    step, norm = before - engine.module.weight.item(), float(engine.get_global_grad_norm())
    seen = f"the step is {step} with the norm {norm}; expected 0.0625, which the clip of 1.0 leaves as it is"
    if SIGNATURE in seen:
        print(f"repro: REPRODUCED: {seen}\n", end="", flush=True)
        return 1
    assert (step, norm) == (0.0625, 0.0625), seen
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
