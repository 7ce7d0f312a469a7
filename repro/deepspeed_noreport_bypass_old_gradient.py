"""Under ZeRO-3 a step moves a layer that the loss did not use by the gradient of an earlier step.

id: bypass-old-gradient
engine: deepspeed
symptom: the step uses an old gradient for a layer that the loss bypasses
reported: no report known
affects: >=0.16.4
fixed: not yet
ranks: 1
law: backward.bypass
signature: the gradient of the step before
ok: repro: a step that bypasses a layer at ZeRO stage 3 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_bypass_old_gradient.py

The failure is silent, at stage 3. A parameter's gradient partition (__param_id_to_grad_partition) is overwritten when
the parameter gets its next gradient, and is never cleared. The end of a backward gives the partitions of all parameters
to the step. Stages 0 to 2 leave the layer unchanged.

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
from deepspeed.utils import safe_get_full_fp32_param

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

OK = "repro: a step that bypasses a layer at ZeRO stage 3 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    # Without this threshold, every rank keeps all weights of so small a model unsharded, and nothing is freed.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.always = nn.Linear(2, 1, bias=False)
        self.sometimes = nn.Linear(2, 1, bias=False)

    def forward(self, x, both):
        return self.always(x) + self.sometimes(x) if both else self.always(x)


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = Model().to(device)
    weight = model.sometimes.weight
    nn.init.ones_(weight)
    x = torch.tensor([[1.0, 3.0]], device=device)
    (old,) = torch.autograd.grad(model(x, both=True).sum(), weight)

    # At a learning rate of 1 SGD moves a weight by its gradient.
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    weights = []
    for both in (True, False):
        engine.backward(engine(x, both=both).sum())
        engine.step()
        weights.append(safe_get_full_fp32_param(weight).clone())
    moved = weights[0] - weights[1]
    if torch.equal(moved, old):
        found = f"an unused layer moved by {moved.tolist()}, the gradient of the step before, instead of not at all"
        print(f"repro: REPRODUCED: {found}\n", end="", flush=True)
        return 1
    torch.testing.assert_close(moved, torch.zeros_like(moved))
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
