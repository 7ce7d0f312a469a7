"""torch.func.grad of a call of the engine raises, or returns a gradient divided by the accumulation steps.

id: 8026-engine
engine: deepspeed
symptom: torch.func on the engine raises at ZeRO stages 0 and 2, and gives too small gradients silently at stage 1
reported: https://github.com/deepspeedai/DeepSpeed/pull/8026
affects: >=0.18.3,<=0.19.0
fixed: 0.19.1
broken: 0.19.0
ranks: 1
law: torch_func.grad
signature: torch.func.grad of the engine is wrong
ok: repro: torch.func.grad of the engine at ZeRO stages 0 to 2 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_8026_torch_func_engine.py

The hooks on the engine's outputs treat any backward that passes through them as one of training, and begin the
reduction of parameters that get no gradient here. On 0.18.3 stage 2 is silent, as stage 1 is. #8026 exempts torch.func
at these stages; stage 3 fails for another reason.

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

SIGNATURE = "torch.func.grad of the engine is wrong"
OK = "repro: torch.func.grad of the engine at ZeRO stages 0 to 2 OK."
STEPS = 4
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": STEPS,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
}


def new_model(device):
    model = nn.Linear(1, 1, bias=False).to(device)
    nn.init.constant_(model.weight, 8.0)
    return model


def gradient(stage, inputs):
    """Return the gradient of the engine's output with respect to its input, or the known error of this release."""
    model = new_model(inputs.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    try:
        return torch.func.grad(lambda each: engine(each).sum())(inputs).item()
    except RuntimeError as error:
        if stage != 0 or "Direct calls to tensor.backward() are not supported" not in str(error):
            raise
        return f"RuntimeError: {error}"
    except IndexError as error:
        if stage != 2 or str(error) != "list index out of range":
            raise
        return f"IndexError: {error}"


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    inputs = torch.ones(1, 1, device=device)
    model = new_model(device)
    wanted = torch.func.grad(lambda each: model(each).sum())(inputs).item()

    found = {stage: gradient(stage, inputs) for stage in (0, 1, 2)}
    if all(isinstance(each, str) or each == wanted / STEPS for each in found.values()):
        print(f"repro: REPRODUCED: {SIGNATURE}: by stage {found} instead of {wanted}\n", end="", flush=True)
        return 1
    assert all(each == wanted for each in found.values()), f"by stage {found} instead of {wanted}"
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
