"""At ZeRO stage 2, zero_grad() after a micro-batch makes the step lose the gradients of the following window.

id: discarded-micro-batch
engine: deepspeed
symptom: after backward and zero_grad() in an accumulation window, the step does not use the gradients of the window
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 1
law: values.discarded
signature: instead of the gradient of its window
ok: repro: a discarded micro-batch at ZeRO stage 2 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_discarded_micro_batch.py

The failure is silent, at stage 2 with gradient accumulation. A caller who finds a loss or a gradient that is not finite
discards the micro-batch by zero_grad(), and trains the window from its beginning. Stages 0, 1 and 3 step with the
gradients of that window.

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

OK = "repro: a discarded micro-batch at ZeRO stage 2 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 2},
}


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = nn.Linear(2, 1, bias=False).to(device)
    nn.init.ones_(model.weight)
    x = torch.tensor([[1.0, 3.0]], device=device)

    # At a learning rate of 1 SGD moves a weight by its gradient.
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    before = safe_get_full_fp32_param(model.weight).clone()
    engine.backward(torch.inf * engine(x).sum())
    engine.optimizer.zero_grad()
    engine.zero_grad()
    for _ in range(2):
        engine.backward(engine(x).sum())
        engine.step()
    moved = before - safe_get_full_fp32_param(model.weight)
    if not torch.equal(moved, x):
        found = f"{moved.tolist()} instead of the gradient of its window, {x.tolist()}"
        print(f"repro: REPRODUCED: the step subtracted {found}\n", end="", flush=True)
        return 1
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
