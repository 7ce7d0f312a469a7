"""DeepSpeed never reduces the gradients of a loss over torch.func.vmap of the engine.

id: backward-through-vmap
engine: deepspeed
symptom: step() raises KeyError: 0 after loss.backward() through a vmap of the engine
reported: no report known
affects: >=0.18.3
fixed: not yet
ranks: 1
law: torch_func.through_transforms
signature: KeyError: 0
ok: repro: loss.backward() through a vmap of the engine trains at ZeRO stage 1 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_backward_through_vmap.py

The engine skips its hooks while a transform runs, so the output has no hook, and DeepSpeed never begins a backward for
the loss. Stage 2 fails in the same way. Before 0.18.3 every loss.backward() fails so, with and without a transform
(#7665).

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

SIGNATURE = "KeyError: 0"
OK = "repro: loss.backward() through a vmap of the engine trains at ZeRO stage 1 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}


def linear(device):
    model = nn.Linear(1, 1, bias=False).to(device)
    nn.init.constant_(model.weight, 5.0)
    return model


def wanted_weight(model, inputs):
    """Return the weight after one step in plain PyTorch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.func.vmap(model)(inputs).sum().backward()
    optimizer.step()
    return model.weight.item()


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    inputs, model = torch.tensor([[1.0], [2.0]]).to(device), linear(device)
    wanted = wanted_weight(linear(device), inputs)

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    torch.func.vmap(engine)(inputs).sum().backward()
    try:
        engine.step()
    except KeyError as error:
        if error.args != (0,):
            raise
        print(f"repro: REPRODUCED: KeyError: {error} in step()\n", end="", flush=True)
        return 1
    assert model.weight.item() == wanted, f"the weight is {model.weight.item()} after a step; expected {wanted}"
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
