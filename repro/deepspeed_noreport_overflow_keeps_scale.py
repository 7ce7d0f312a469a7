"""Under torch_autocast in fp16 an overflow does not lower the loss scale.

id: overflow-keeps-scale
engine: deepspeed
symptom: the loss scale is the same after a step that overflowed, so the next step overflows as well
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 1
law: precision.grad_scaler
signature: the loss scale is 65536.0 after an overflow
ok: repro: an overflow halves the loss scale of torch_autocast at ZeRO stage 1 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_overflow_keeps_scale.py

ZeRO 1 and 2 keep torch's GradScaler. Since 0.19.8 they also treat a norm that is not finite as an overflow, and then
leave `step()` before they update the scaler (`runtime/zero/stage_1_and_2.py`).

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

SIGNATURE = "the loss scale is 65536.0 after an overflow"
OK = "repro: an overflow halves the loss scale of torch_autocast at ZeRO stage 1 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "torch_autocast": {"enabled": True, "dtype": "float16"},
    "zero_optimization": {"stage": 1},
}


def wanted_scale(model, inputs):
    """Return the scale of torch.amp.GradScaler after one step on infinite gradients."""
    scaler = torch.amp.GradScaler(inputs.device.type)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(inputs).sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return scaler.get_scale()


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model, inputs = nn.Linear(2, 1).to(device), torch.ones(1, 2).to(device)
    wanted = wanted_scale(model, inputs)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    scaler = engine.optimizer.torch_autocast_gradscaler
    engine.backward(engine(inputs).sum() * float("inf"))
    engine.step()
    told = f"the loss scale is {scaler.get_scale()} after an overflow; torch.amp.GradScaler's is {wanted}"
    if SIGNATURE in told:
        print(f"repro: REPRODUCED: {told}\n", end="", flush=True)
        return 1
    assert scaler.get_scale() == wanted, told
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
