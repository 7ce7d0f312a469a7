"""In bf16 at ZeRO stage 0, DeepSpeed divides gradients by a loss scale although it never scaled the loss.

id: 7837
engine: deepspeed
symptom: bf16 without ZeRO does not learn, and its gradient norms differ from those of ZeRO stages 1 to 3
reported: https://github.com/deepspeedai/DeepSpeed/issues/7837
affects: >=0.18.3,<=0.18.5
fixed: 0.18.6
broken: 0.18.5
ranks: 1
law: training.grads
signature: the step used the gradient divided by 65536
ok: repro: a step in bf16 at ZeRO stage 0 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_7837_bf16_loss_scale.py

DeepSpeed uses the fp16 optimizer wrapper for bf16 too, with its initial loss scale of 65536, and the wrapper's step
unscales. Since 0.18.3 engine.backward does not call the wrapper's backward any more, which scaled the loss. Fixed by
#7839.

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

SIGNATURE = "the step used the gradient divided by 65536"
OK = "repro: a step in bf16 at ZeRO stage 0 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 0},
}


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = nn.Linear(1, 1, bias=False).to(device)
    nn.init.zeros_(model.weight)
    inputs = torch.full((1, 1), 2.0, device=device)
    wanted = torch.autograd.grad(model(inputs).sum(), model.weight)[0].item()

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    engine.backward(engine(inputs.bfloat16()).sum())
    engine.step()
    used = -engine.module.weight.item()  # SGD with lr 1 has subtracted the gradient from zero
    if used == wanted / 65536:
        print(f"repro: REPRODUCED: {SIGNATURE}: {used} instead of {wanted}\n", end="", flush=True)
        return 1
    assert used == wanted, f"the step used {used} instead of {wanted}"
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
