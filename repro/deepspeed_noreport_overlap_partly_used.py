"""With overlap_comm at stage 1, a step is wrong for a weight that only an earlier micro-batch of the window uses.

id: overlap-partly-used
engine: deepspeed
symptom: with overlap_comm, a step is wrong for a weight that only the first micro-batch of a window uses
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 2
law: window.partly_used
signature: a weight of the first micro-batch alone is stepped wrongly
ok: repro: with overlap_comm a weight of one micro-batch of the window is trained OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_overlap_partly_used.py

With overlap_comm the hooks reduce each gradient in the last backward of the window, and this weight has no gradient
there.

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

SIGNATURE = "a weight of the first micro-batch alone is stepped wrongly"
OK = "repro: with overlap_comm a weight of one micro-batch of the window is trained OK."
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
    rank = torch.distributed.get_rank()
    model = TwoWeights()
    zero = {"stage": 1, "overlap_comm": True}
    engine = build(model, zero, gradient_accumulation_steps=2)
    for both in (True, False):
        engine.backward((1 + 2 * rank) * engine(both))
        engine.step()
    got = model.idle.tolist()
    if got != [-1.0] * 4:  # half of the mean of 1 and 3
        wrong.append(f"got {got}, expected -1")
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
