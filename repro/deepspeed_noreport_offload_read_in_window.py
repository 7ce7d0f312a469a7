"""With offload_optimizer at stage 3, safe_get_full_grad returns zeros inside an accumulation window.

id: offload-read-in-window
engine: deepspeed
symptom: safe_get_full_grad returns zeros before the last backward of a window, at stage 3 with offloading
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 1
law: access.read_grad_in_window
signature: safe_get_full_grad returns zeros inside a window
ok: repro: with offload_optimizer safe_get_full_grad inside a window OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_offload_read_in_window.py

safe_get_full_grad reads a buffer in CPU memory that the last backward of the window fills. Without offloading the
gradient is right.

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

SIGNATURE = "safe_get_full_grad returns zeros inside a window"
OK = "repro: with offload_optimizer safe_get_full_grad inside a window OK."
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
    model = nn.Linear(2, 2, bias=False)
    weight = model.weight
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
    engine = build(model, zero, gradient_accumulation_steps=2, zero_force_ds_cpu_optimizer=False)
    engine.backward(engine(torch.ones(1, 2)).sum())
    grad = safe_get_full_grad(weight)
    if not grad.any():
        wrong.append(f"got {grad.tolist()}")
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
