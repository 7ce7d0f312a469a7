"""At stage 0, the second of two backwards before a step sums the gradient of the first one over the ranks again.

id: earlier-backwards-reduced-again
engine: deepspeed
symptom: stage 0, gradient_allreduce_op sum: of two backwards in a step, the first counts once more for each rank
reported: documented limit, https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/engine.py#L3467
affects: >=0.19.8
fixed: not yet
ranks: 2
law: checkpointing.frozen
signature: the first backward was summed over the ranks twice
ok: repro: two backwards of a step at stage 0 are summed over the ranks once OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_earlier_backwards_reduced_again.py

Each backward is at the accumulation boundary and reduces param.grad, which already holds the reduced sum of the earlier
backwards. A mean of equal means does not change; a sum does. With set_gradient_accumulation_boundary(False) before all
but the last backward, the gradient is right, and the script asserts this.

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

SIGNATURE = "the first backward was summed over the ranks twice"
OK = "repro: two backwards of a step at stage 0 are summed over the ranks once OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "gradient_allreduce_op": "sum",
    "zero_optimization": {"stage": 0},
}


def run_two_backwards(says_boundary):
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    for is_last in (False, True):
        if says_boundary:
            engine.set_gradient_accumulation_boundary(is_last)
        engine.backward(engine(torch.ones(1, 1)).sum())
    return engine.module.weight.grad.item()


def main():
    deepspeed.init_distributed()
    expected = 2.0 * torch.distributed.get_world_size()
    assert run_two_backwards(says_boundary=True) == expected
    found = run_two_backwards(says_boundary=False)
    if found != expected:
        print(f"repro: REPRODUCED: {SIGNATURE}: got {found}, expected {expected}\n", end="", flush=True)
        return 1
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
