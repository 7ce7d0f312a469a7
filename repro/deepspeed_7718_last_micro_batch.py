"""With gradient accumulation, a step of ZeRO-2 uses the gradient of the last micro-batch alone.

id: 7718
engine: deepspeed
symptom: with accumulation, gradient norms are too small under ZeRO-2 and right under ZeRO-3
reported: https://github.com/deepspeedai/DeepSpeed/issues/7718
affects: >=0.17.6,<=0.18.2
fixed: 0.18.3
broken: 0.18.2
ranks: 1
law: training.accumulation
signature: the step used the last micro-batch alone
ok: repro: two accumulated micro-batches at ZeRO stage 2 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_7718_last_micro_batch.py

Each backward replaces the gradients that earlier backwards left in the partition, instead of adding to them.

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

SIGNATURE = "the step used the last micro-batch alone"
OK = "repro: two accumulated micro-batches at ZeRO stage 2 OK."
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
    model = nn.Linear(1, 1, bias=False).to(device)
    nn.init.zeros_(model.weight)
    micro_batches = [torch.full((1, 1), value, device=device) for value in (2.0, 6.0)]
    first, last = (torch.autograd.grad(model(each).sum(), model.weight)[0].item() for each in micro_batches)

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    for each in micro_batches:
        engine.backward(engine(each).sum())
        engine.step()
    used = -model.weight.item()  # SGD with lr 1 has subtracted the gradient from zero
    if used == last / 2:
        print(f"repro: REPRODUCED: {SIGNATURE}: {used} instead of {(first + last) / 2}\n", end="", flush=True)
        return 1
    assert used == (first + last) / 2, f"the step used {used}"
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
