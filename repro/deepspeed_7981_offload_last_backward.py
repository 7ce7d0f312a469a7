"""With an offloaded optimizer, the last of several backwards before a step replaces the gradients of the earlier ones.

id: 7981
engine: deepspeed
symptom: with offload_optimizer and accumulation 1, a step after several backwards uses the last gradient alone
reported: https://github.com/deepspeedai/DeepSpeed/pull/7981
affects: >=0.17.6,<=0.18.6
fixed: 0.19.0
broken: 0.18.6
ranks: 1
law: training.several_backwards
signature: the step used the last backward alone
ok: repro: two backwards before a step with an offloaded optimizer OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_7981_offload_last_backward.py

Stages 1 and 2 keep a sum on the CPU only if gradient_accumulation_steps is larger than 1; otherwise each backward is at
the boundary and overwrites the partition. DeepSpeed documents set_gradient_accumulation_boundary(False) before all but
the last backward as the way to run several backwards.

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

SIGNATURE = "the step used the last backward alone"
OK = "repro: two backwards before a step with an offloaded optimizer OK."

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
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
    for value, is_last in ((2.0, False), (6.0, True)):
        engine.set_gradient_accumulation_boundary(is_last)
        engine.backward(engine(torch.full((1, 1), value, device=engine.device)).sum())
    engine.step()
    used = -engine.module.weight.item()  # SGD with lr 1 has subtracted the gradient from zero
    if used == 6.0:
        print(f"repro: REPRODUCED: {SIGNATURE}: {used} instead of 8.0\n", end="", flush=True)
        return 1
    assert used == 8.0, used
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
