"""ZeRO-2 and 3 raise for a layer in two regions of reentrant checkpointing, because its gradient comes twice.

id: 458
engine: deepspeed
symptom: "has already been reduced" in the backward of a loss with one layer in two reentrant checkpoints
reported: https://github.com/deepspeedai/DeepSpeedExamples/issues/458
affects: >=0.16.4
fixed: not yet
ranks: 1
law: checkpointing.two_regions
signature: has already been reduced
ok: repro: one layer in two reentrant checkpoints at ZeRO stage 2 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_458_reentrant_shared_layer.py

A reentrant region runs a backward of its own, so the layer's gradient comes twice in one backward. With
use_reentrant=False the gradient is right. Stage 3 raises an AssertionError without a message. Also reported:
huggingface/transformers#18330.

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

SIGNATURE = "has already been reduced"
OK = "repro: one layer in two reentrant checkpoints at ZeRO stage 2 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 2},
}


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)

    def forward(self, x):
        return checkpoint(self.layer, checkpoint(self.layer, x, use_reentrant=True), use_reentrant=True)


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = Twice().to(device)
    weight = model.layer.weight
    nn.init.ones_(weight)
    x = torch.tensor([[1.0, 3.0]], device=device, requires_grad=True)
    model(x).sum().backward()
    wanted, weight.grad = weight.grad, None
    before = weight.detach().clone()

    # At a learning rate of 1 SGD moves the weight by its gradient.
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    try:
        engine.backward(engine(x).sum())
    except AssertionError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    engine.step()
    torch.testing.assert_close(before - weight.detach(), wanted)
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
