"""DeepSpeed runs a backward over weights that a step has changed, and mixes old and new; PyTorch raises instead.

id: step-mixes-gradients
engine: deepspeed
symptom: backward(retain_graph=True), step(), backward() returns gradients of weights that the model never had
reported: no report known
affects: >=0.16.4
fixed: not yet
ranks: 1
law: double_backward.step_between_retained_backwards
signature: the second backward gives [1.0, 2.0]
ok: repro: a backward over weights that a step has changed is refused at ZeRO stage 1 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_step_mixes_gradients.py

The step writes the weights through `.data`, so autograd's version counters do not change. The model is b * (a * x) with
a = 2, b = 3, x = 1; its gradients are b and a * x: [3, 2]. The step sets a = -1, b = 1, whose gradients are [1, -1].
ZeRO 2 does the same.

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

SIGNATURE = "the second backward gives [1.0, 2.0]"
OK = "repro: a backward over weights that a step has changed is refused at ZeRO stage 1 OK."
REFUSED = "modified by an inplace operation"
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}


def chain(device):
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).to(device)
    for layer, value in zip(model, (2.0, 3.0), strict=True):
        nn.init.constant_(layer.weight, value)
    return model


def refuses(loss, backward, step):
    """Return whether the second of two backwards over one graph raises if a step lies between them."""
    backward(loss, retain_graph=True)
    step()
    try:
        backward(loss)
    except RuntimeError as error:
        if REFUSED not in str(error):
            raise
        return True
    return False


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    inputs, plain, model = torch.ones(1, 1).to(device), chain(device), chain(device)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    assert refuses(plain(inputs).sum(), torch.autograd.backward, optimizer.step), "plain PyTorch computes it"

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    if not refuses(engine(inputs).sum(), engine.backward, engine.step):
        told = f"the second backward gives {[safe_get_full_grad(param).item() for param in model.parameters()]}"
        assert SIGNATURE in told, told
        print(f"repro: REPRODUCED: {told}; plain PyTorch refuses it\n", end="", flush=True)
        return 1
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
