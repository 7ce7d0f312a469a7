"""Under ZeRO-3, DeepSpeed never trains a layer that is unfrozen after deepspeed.initialize.

id: 5639
engine: deepspeed
symptom: a parameter that was frozen when the engine was built never changes, even after it is unfrozen
reported: https://github.com/deepspeedai/DeepSpeed/issues/5639
affects: >=0.16.4
fixed: not yet
ranks: 1
law: parameters.frozen_and_unfrozen
signature: the weights are [2.0, 1.0]
ok: repro: a layer unfrozen after initialize is trained at ZeRO stage 3 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_5639_unfrozen_never_trained.py

DeepSpeed decides which parameters train when the engine is built: a parameter that is frozen then has no place in
DeepSpeed's gradients. DeepSpeed gives no warning: the parameter's `grad` exists, and is this rank's own gradient. Stage
1 does the same: deepspeed_1767_unfrozen_never_trained.py. The model is b * (a * x) with a = 2, b = 3, x = 1, a frozen;
its gradients are [3, 2], so a step with the rate 1 gives [-1, 1].

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

SIGNATURE = "the weights are [2.0, 1.0]"
OK = "repro: a layer unfrozen after initialize is trained at ZeRO stage 3 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    # Without this threshold, every rank keeps all weights of so small a model unsharded.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def chain(device):
    """Return two layers of one weight each; the first layer is frozen."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).to(device)
    for layer, value in zip(model, (2.0, 3.0), strict=True):
        nn.init.constant_(layer.weight, value)
    model[0].requires_grad_(False)
    return model


def wanted_weights(model, inputs):
    """Return the weights after the same step in plain PyTorch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model[0].requires_grad_(True)
    model(inputs).sum().backward()
    optimizer.step()
    return [param.item() for param in model.parameters()]


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    inputs, model = torch.ones(1, 1).to(device), chain(device)
    wanted = wanted_weights(chain(device), inputs)

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    model[0].requires_grad_(True)
    engine.backward(engine(inputs).sum())
    engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        found = [param.item() for param in model.parameters()]
    told = f"the weights are {found} after a step; in plain PyTorch they are {wanted}"
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
