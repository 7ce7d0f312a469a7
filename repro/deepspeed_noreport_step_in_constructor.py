"""In bf16 at stage 0, building the engine runs one step of the optimizer.

id: step-in-constructor
engine: deepspeed
symptom: building the engine makes an extra step of weight decay, momentum and Adam's count, so the first step is wrong
reported: no report known
affects: >=0.17.6
fixed: not yet
ranks: 1
law: training.trajectory
signature: the weight is 1.53125 after one step
ok: repro: one step of bf16 at stage 0 is one step of the optimizer OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_step_in_constructor.py

`initialize_optimizer_states` of FP16_UnfusedOptimizer (`runtime/fp16/unfused_optimizer.py`) steps on zero gradients to
allocate the optimizer's state. The ZeRO optimizers and BF16_Optimizer did the same (#5151) until #5104. Here the input
and the gradient are 0, so weight decay alone moves the weight, from 2 to 2 - 0.25 x 0.5 x 2 = 1.75, and a second time
to 1.53125.

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

SIGNATURE = "the weight is 1.53125 after one step"
OK = "repro: one step of bf16 at stage 0 is one step of the optimizer OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 0},
}


def decaying(model):
    return torch.optim.SGD(model.parameters(), lr=0.25, weight_decay=0.5)


def linear(device):
    model = nn.Linear(1, 1, bias=False).to(device)
    nn.init.constant_(model.weight, 2.0)
    return model


def wanted_weight(model, inputs):
    """Return the weight after one step of the same optimizer in plain PyTorch."""
    optimizer = decaying(model)
    model(inputs).sum().backward()
    optimizer.step()
    return model.weight.item()


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    inputs, model = torch.zeros(1, 1).to(device), linear(device)
    wanted = wanted_weight(linear(device), inputs)

    engine = deepspeed.initialize(model=model, optimizer=decaying(model), config=CONFIG)[0]
    engine.backward(engine(inputs.bfloat16()).sum())
    engine.step()
    found = model.weight.item()
    told = f"the weight is {found} after one step; in plain PyTorch it is {wanted}"
    if SIGNATURE in told:
        print(f"repro: REPRODUCED: {told}\n", end="", flush=True)
        return 1
    assert found == wanted, told
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
