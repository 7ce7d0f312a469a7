"""If the caller runs loss.backward() instead of engine.backward(loss), nothing is reduced and the step raises.

id: 7665
engine: deepspeed
symptom: engine.step() raises KeyError after loss.backward(), which itself does not raise
reported: https://github.com/deepspeedai/DeepSpeed/pull/7665
affects: <=0.18.2
fixed: 0.18.3
broken: 0.18.2
ranks: 1
law: backward.tensor_backward
signature: engine.step() after loss.backward() raises KeyError: 0
ok: repro: loss.backward() over two accumulated micro-batches at ZeRO stages 1 to 3 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_7665_direct_backward.py

engine.backward divides by the accumulation steps and ends the reduction. #7665 moves both into hooks, which
loss.backward() runs too.

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

SIGNATURE = "engine.step() after loss.backward() raises KeyError: 0"
OK = "repro: loss.backward() over two accumulated micro-batches at ZeRO stages 1 to 3 OK."
STAGES = (1, 2, 3)
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
}


def new_model(device):
    model = nn.Linear(1, 1, bias=False).to(device)
    nn.init.zeros_(model.weight)
    return model


def used_gradient(stage, micro_batches):
    """Return the gradient that the step subtracts from the weight, or the known error of this release."""
    model = new_model(micro_batches[0].device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    for each in micro_batches:
        engine(each).sum().backward()
        try:
            engine.step()
        except KeyError as error:
            return f"KeyError: {error}"
    with deepspeed.zero.GatheredParameters([model.weight]):
        return -model.weight.item()


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    micro_batches = [torch.full((1, 1), value, device=device) for value in (2.0, 6.0)]
    model = new_model(device)
    wanted = sum(torch.autograd.grad(model(each).sum(), model.weight)[0].item() for each in micro_batches) / 2

    used = {stage: used_gradient(stage, micro_batches) for stage in STAGES}
    if all(each == "KeyError: 0" for each in used.values()):
        print(f"repro: REPRODUCED: {SIGNATURE}, at stages {STAGES}\n", end="", flush=True)
        return 1
    assert all(each == wanted for each in used.values()), f"by stage {used} instead of {wanted}"
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
