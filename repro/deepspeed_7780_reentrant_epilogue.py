"""With reentrant checkpointing, out.backward(g) leaves the gradients of the layers before the checkpoint unreduced.

id: 7780
engine: deepspeed
symptom: at ZeRO stages 1 and 2 layers before a reentrant checkpoint do not learn, and later steps raise
reported: https://github.com/deepspeedai/DeepSpeed/pull/7780
affects: >=0.18.3,<=0.18.4
fixed: 0.18.5
broken: 0.18.4
ranks: 1
law: checkpointing.non_scalar
signature: the layer before the checkpoint got no gradient
ok: repro: out.backward(g) through a reentrant checkpoint at ZeRO stages 1 and 2 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_7780_reentrant_epilogue.py

The end of the reduction waits for as many gradients as the graph shows when the first gradient arrives. The
checkpointed layer is not in that graph yet, so the reduction ends one layer too early. Stage 3 raises in the first
step.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import importlib
import os
import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))  # DeepSpeed's CPU accelerator asks for it

import deepspeed

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "the layer before the checkpoint got no gradient"
OK = "repro: out.backward(g) through a reentrant checkpoint at ZeRO stages 1 and 2 OK."
STAGES = (1, 2)
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
}


class ThreeLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(1, 1, bias=False) for _ in range(3))
        for layer, weight in ((self.first, 2.0), (self.middle, 3.0), (self.last, 5.0)):
            nn.init.constant_(layer.weight, weight)

    def forward(self, x):
        return self.last(checkpoint(self.middle, self.first(x), use_reentrant=True))


def used_gradients(stage, x, g):
    """Return the gradients that the first step subtracts from the weight of each layer."""
    model = ThreeLayers().to(x.device)
    before = [weight.item() for weight in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine(x).backward(g)
    engine.step()
    return [old - weight.item() for old, weight in zip(before, model.parameters(), strict=True)]


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    x, g = torch.ones(1, 1, device=device), torch.ones(1, 1, device=device)
    model = ThreeLayers().to(device)
    model(x).backward(g)
    wanted = [weight.grad.item() for weight in model.parameters()]

    used = {stage: used_gradients(stage, x, g) for stage in STAGES}
    if all(gradients == [0.0, *wanted[1:]] for gradients in used.values()):
        print(f"repro: REPRODUCED: {SIGNATURE}: by stage {used} instead of {wanted}\n", end="", flush=True)
        return 1
    assert all(gradients == wanted for gradients in used.values()), f"by stage {used} instead of {wanted}"
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
