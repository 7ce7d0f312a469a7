"""DeepSpeed counts a micro-batch that zero_grad discarded, so the next step comes early, with half of its gradient.

id: given-up-counted
engine: deepspeed
symptom: after zero_grad within an accumulation window, the next step comes before its last micro-batch
reported: no report known
affects: >=0.16.4
fixed: not yet
ranks: 1
law: training.several_backwards
signature: the weight moved by 1.0 after 1 of 2 micro-batches
ok: repro: a window behind a micro-batch that was given up is whole at ZeRO stage 1 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_given_up_counted.py

is_gradient_accumulation_boundary() counts engine.micro_steps, which neither the engine's zero_grad nor the optimizer's
resets. The script discards one micro-batch, as a caller does if its loss is not finite. Two more micro-batches follow,
a window of their own. Their losses have the gradients 2 and 4, whose mean is 3, and the learning rate is 1. Stages 0
and 2 do the same.

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

SIGNATURE = "the weight moved by 1.0 after 1 of 2 micro-batches"
OK = "repro: a window behind a micro-batch that was given up is whole at ZeRO stage 1 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}
FACTORS = (2.0, 4.0)  # the factors by which the losses multiply the output
WANTED = 3.0  # the mean of their gradients


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model, inputs = nn.Linear(1, 1, bias=False).to(device), torch.ones(1, 1).to(device)
    nn.init.zeros_(model.weight)  # so that every later weight is exact
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]

    engine.backward(64.0 * engine(inputs).sum())
    engine.step()  # inside the window, so this step moves nothing
    engine.optimizer.zero_grad()
    engine.zero_grad()
    for micro_batches, factor in enumerate(FACTORS, start=1):
        engine.backward(factor * engine(inputs).sum())
        engine.step()
        moved = -model.weight.item()
        told = f"the weight moved by {moved} after {micro_batches} of {len(FACTORS)} micro-batches"
        if SIGNATURE in told:
            print(f"repro: REPRODUCED: {told}\n", end="", flush=True)
            return 1
    assert moved == WANTED, told
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
