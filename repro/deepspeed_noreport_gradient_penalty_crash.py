"""torch.autograd.grad(..., create_graph=True) through an engine raises, so a gradient penalty cannot be trained.

id: gradient-penalty-crash
engine: deepspeed
symptom: torch.autograd.grad of the engine's output raises IndexError
reported: no report known
affects: >=0.18.5
fixed: not yet
ranks: 1
law: double_backward.gradient_penalty
signature: list index out of range
ok: repro: a gradient penalty at ZeRO stage 1 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_gradient_penalty_crash.py

Stages 0 to 3 all raise, each with another error. The hook on the engine's output begins a backward of the engine, and
the end of this backward looks for the parameters' gradients. Stage 3 raises "mat2 must be a matrix". Stage 1 is right
up to 0.18.4.

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

SIGNATURE = "list index out of range"
OK = "repro: a gradient penalty at ZeRO stage 1 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}


def penalty(model, x):
    """Return the squared norm of the gradient of a loss with respect to the inputs."""
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return grad.square().sum()


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = nn.Linear(2, 1, bias=False).to(device)
    nn.init.ones_(model.weight)
    x = torch.tensor([[1.0, 3.0]], device=device, requires_grad=True)
    (wanted,) = torch.autograd.grad(penalty(model, x), model.weight)
    before = model.weight.detach().clone()

    # At a learning rate of 1 SGD moves the weight by its gradient.
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    try:
        engine.backward(penalty(engine, x))
    except IndexError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: IndexError: {error}\n", end="", flush=True)
        return 1
    engine.step()
    torch.testing.assert_close(before - model.weight.detach(), wanted)
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
