"""At ZeRO stage 3, hpZ raises IndexError for a weight that has fewer elements than there are ranks.

id: 8210
engine: deepspeed
symptom: zero_hpz_partition_size with a tiny parameter: IndexError in _partition_param_sec
reported: https://github.com/deepspeedai/DeepSpeed/issues/6659
affects: >=0.18.8,<=0.19.1
fixed: 0.19.5
broken: 0.19.1
ranks: 4
law: parameters.every_kind
signature: start out of range
ok: repro: a weight of one element with hpZ OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=4 repro/deepspeed_8210_hpz_small_weight.py

The secondary copy of a rank may begin after the end of a small weight, where even an empty slice raises.

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

SIGNATURE = "start out of range"
OK = "repro: a weight of one element with hpZ OK."

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
    # Without this threshold, every rank keeps all weights of so small a model unsharded.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "zero_hpz_partition_size": 2},
}


def main():
    deepspeed.init_distributed()
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    try:
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
        engine.backward(engine(torch.ones(1, 1, device=engine.device)).sum())
        engine.step()
    except (IndexError, RuntimeError) as error:  # the other ranks wait in a collective
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
