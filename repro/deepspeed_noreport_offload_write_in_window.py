"""With offload_optimizer at stage 2, DeepSpeed ignores safe_set_full_grad inside an accumulation window.

id: offload-write-in-window
engine: deepspeed
symptom: at stage 2 with offloading, a gradient that is set before the last backward of a window is silently ignored
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 1
law: access.write_grad
signature: the step used the gradient as if it had not been set
ok: repro: with offload_optimizer safe_set_full_grad inside a window OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_offload_write_in_window.py

safe_set_full_grad writes into a buffer in CPU memory. The last backward of the window fills this buffer again, from the
sum that the earlier backwards left elsewhere. At stage 1 the write has an effect; without offloading stage 2 raises a
ValueError.

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
from deepspeed.utils import safe_set_full_grad

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "the step used the gradient as if it had not been set"
OK = "repro: with offload_optimizer safe_set_full_grad inside a window OK."
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
    model = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(model.weight)
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    engine = build(model, zero, gradient_accumulation_steps=2, zero_force_ds_cpu_optimizer=False)
    engine.backward(engine(torch.ones(1, 2)).sum())  # the gradient so far is 0.5: half of the loss's gradient
    safe_set_full_grad(model.weight, torch.full((2, 2), 8.0))
    engine.step()
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    moved = -model.weight[0, 0].item()
    if moved == 1.0:
        print(f"repro: REPRODUCED: {SIGNATURE}: {moved}, and 8.5 is right\n", end="", flush=True)
        return 1
    assert moved == 8.5, moved
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
