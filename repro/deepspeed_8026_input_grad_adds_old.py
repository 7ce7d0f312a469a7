"""After torch.autograd.grad at ZeRO stage 3, the next backward adds the gradient of the last step.

id: input-grad-adds-old
engine: deepspeed
symptom: silent: at stage 3, a step uses the sum of its own gradient and the gradient of the step before
reported: https://github.com/deepspeedai/DeepSpeed/pull/8026
affects: >=0.19.8
fixed: not yet
ranks: 1
law: backward.autograd_grad
signature: the gradient of the step before was added
ok: repro: a backward after torch.autograd.grad at ZeRO stage 3 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_8026_input_grad_adds_old.py

The hooks on the engine's output treat torch.autograd.grad as a backward of the loss. When it ends, the engine notes
that the next backward is not the first one of its step. So stage 3 adds the next gradient to a gradient partition that
still holds the gradient of the last step.

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
from deepspeed.utils import safe_get_full_grad

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "the gradient of the step before was added"
OK = "repro: a backward after torch.autograd.grad at ZeRO stage 3 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    # Without this threshold, every rank keeps all weights of so small a model unsharded, and nothing is freed.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = nn.Sequential(nn.Linear(2, 1, bias=False)).to(device)
    weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]

    # The gradient of the weight is the input.
    old, new = torch.tensor([[1.0, 3.0]], device=device), torch.tensor([[10.0, 20.0]], device=device)
    engine.backward(engine(old).sum())
    engine.step()
    x = torch.ones(1, 2, device=device, requires_grad=True)
    torch.autograd.grad(engine(x).sum(), x)
    engine.backward(engine(new).sum())
    grad = safe_get_full_grad(weight)
    if torch.equal(grad, old + new):
        print(f"repro: REPRODUCED: {SIGNATURE}: {grad.tolist()} instead of {new.tolist()}\n", end="", flush=True)
        return 1
    torch.testing.assert_close(grad, new)
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
