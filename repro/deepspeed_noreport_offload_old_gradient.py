"""With offload_optimizer, a step that does not use a weight applies the weight's gradient from an earlier step.

id: offload-old-gradient
engine: deepspeed
symptom: with offload_optimizer, a step that does not use a weight moves the weight by its old gradient
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 1
law: idle.whole_step
signature: a step that does not use a weight moves it by its old gradient
ok: repro: with offload_optimizer a weight that a step does not use stays OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_offload_old_gradient.py

DeepSpeed keeps gradients in CPU buffers and never clears these buffers. Stage 3 does the same without offloading
(bypass-old-gradient).

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

SIGNATURE = "a step that does not use a weight moves it by its old gradient"
OK = "repro: with offload_optimizer a weight that a step does not use stays OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
}


def build(model, zero, optimizer=None, **options):
    config = {**CONFIG, **options, "zero_optimization": zero}
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


class TwoWeights(nn.Module):
    """Return the sum of a weight of four zeros, or of two such weights."""

    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

    def forward(self, both):
        return self.used.sum() + (self.idle.sum() if both else 0)


def main():
    deepspeed.init_distributed()
    wrong = []
    for stage in (1, 2):
        model = TwoWeights()
        zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
        engine = build(model, zero, zero_force_ds_cpu_optimizer=False)
        seen = []
        for both in (True, False):
            engine.backward(engine(both))
            engine.step()
            engine.zero_grad()
            seen.append(model.idle[0].item())
        if seen != [-1, -1]:
            wrong.append(f"stage {stage}: got {seen}, expected [-1, -1]")
    if wrong:
        print(f"repro: REPRODUCED: {SIGNATURE}: {wrong}\n", end="", flush=True)
        return 1
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
