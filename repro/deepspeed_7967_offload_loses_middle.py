"""With an offloaded optimizer, ZeRO stages 1 and 2 drop all micro-batches of a window but the first and the last.

id: 7967
engine: deepspeed
symptom: silent: gradients and norms too small with offload_optimizer and an accumulation of 3 or more
reported: https://github.com/deepspeedai/DeepSpeed/pull/7967
affects: ==0.18.6
fixed: 0.19.0
broken: 0.18.6
ranks: 1
law: training.accumulation
signature: the step used the first and the last micro-batch alone
ok: repro: three accumulated micro-batches with an offloaded optimizer OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_7967_offload_loses_middle.py

Only the first micro-batch copies the sum of a window to the CPU. Each later micro-batch adds that copy to its own
gradient, and the step uses the sum of the last micro-batch.

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

SIGNATURE = "the step used the first and the last micro-batch alone"
OK = "repro: three accumulated micro-batches with an offloaded optimizer OK."

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}


def main():
    deepspeed.init_distributed()
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    for value in (4.0, 8.0, 12.0, 16.0):
        engine.backward(engine(torch.full((1, 1), value, device=engine.device)).sum())
        engine.step()
    used = -engine.module.weight.item()  # SGD with lr 1 has subtracted the gradient from zero
    if used == 5.0:
        print(f"repro: REPRODUCED: {SIGNATURE}: {used} instead of 10.0\n", end="", flush=True)
        return 1
    assert used == 10.0, used
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
