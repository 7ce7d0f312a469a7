"""Inside an accumulation window, safe_get_full_grad returns each rank's own gradient instead of the mean over ranks.

id: grad-read-in-window
engine: deepspeed
symptom: after the first of two backwards, safe_get_full_grad returns another gradient on each rank, not the mean
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 2
law: access.read_grad_in_window
signature: the gradient of this rank alone, not reduced
ok: repro: inside an accumulation window safe_get_full_grad at ZeRO stage 1 returns the mean over ranks OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_grad_read_in_window.py

DeepSpeed documents that "the gradients are valid after backward and before step". Stage 1 keeps the gradients of a
window in param.grad and reduces them in the last backward, and safe_get_full_grad returns param.grad if it exists.
Stage 2 raises "Gradients are only available immediately after backward and before engine step" at the same point, on
the rank that owns the elements.

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

SIGNATURE = "the gradient of this rank alone, not reduced"
OK = "repro: inside an accumulation window safe_get_full_grad at ZeRO stage 1 returns the mean over ranks OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 1},
}


def main():
    deepspeed.init_distributed()
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    engine.backward(engine(torch.full((1, 1), 2.0 * (rank + 1), device=engine.device)).sum())
    found = safe_get_full_grad(engine.module.weight).item()
    alone, mean = rank + 1.0, sum(other + 1.0 for other in range(ranks)) / ranks  # half of the inputs: a window of two
    if found == alone != mean:
        print(f"repro: REPRODUCED: {SIGNATURE}: got {found}, expected {mean}\n", end="", flush=True)
        return 1
    assert found == mean, found
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
