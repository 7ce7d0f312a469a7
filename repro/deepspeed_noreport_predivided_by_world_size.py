"""At stage 3, a gradient_predivide_factor equal to the world size divides gradients twice.

id: predivided-by-world-size
engine: deepspeed
symptom: gradients are halved at stage 3 if gradient_predivide_factor is the world size of 2
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 2
law: training.grads
signature: every gradient is divided by the factor once too often
ok: repro: gradient_predivide_factor leaves the gradients of stage 3 as they are OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_predivided_by_world_size.py

__avg_scatter_contiguous_grads divides by the world size and by the factor, and multiplies by the factor only if the
factor differs from the world size. Factors of 1 and 4 are right on 2 ranks.

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

SIGNATURE = "every gradient is divided by the factor once too often"
OK = "repro: gradient_predivide_factor leaves the gradients of stage 3 as they are OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
}


def build(model, zero, optimizer=None, **options):
    config = {**CONFIG, **options, "zero_optimization": zero}
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def main():
    deepspeed.init_distributed()
    wrong = []
    for factor in (1.0, 2.0, 4.0):
        model = nn.Linear(2, 2, bias=False)
        weight = model.weight
        zero = {"stage": 3, "reduce_scatter": False, "stage3_param_persistence_threshold": 0}
        engine = build(model, zero, gradient_predivide_factor=factor)
        engine.backward(engine(torch.ones(1, 2)).sum())
        grad = safe_get_full_grad(weight)
        if not torch.equal(grad, torch.ones(2, 2)):
            wrong.append(f"factor {factor}: got {grad.tolist()}, expected ones")
        engine.step()
        engine.destroy()
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
