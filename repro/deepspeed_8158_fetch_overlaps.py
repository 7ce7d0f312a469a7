"""With stage3_use_all_reduce_for_fetch_params, the all-reduce adds the padding of one weight to the next weight.

id: 8158
engine: deepspeed
symptom: silent: with stage3_use_all_reduce_for_fetch_params, wrong weights after a weight of an uneven size
reported: https://github.com/deepspeedai/DeepSpeed/pull/8158
affects: >=0.18.8,<=0.19.3
fixed: 0.19.4
broken: 0.19.1
ranks: 2
law: resources.poisoned_memory
signature: memory that was never written is in the output
ok: repro: weights of uneven sizes fetched by all-reduce OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_8158_fetch_overlaps.py

The buffer of the all-reduce has room for the padding of each weight, but the next weight begins before this padding
ends. DeepSpeed never writes the padding, so its values depend on the allocator; here fresh memory is filled with NaN.

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

SIGNATURE = "memory that was never written is in the output"
OK = "repro: weights of uneven sizes fetched by all-reduce OK."

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
    # Without this threshold, every rank keeps all weights of so small a model unsharded.
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_use_all_reduce_for_fetch_params": True,
    },
}


def main():
    deepspeed.init_distributed()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    model = nn.Linear(1, 3)  # three weights and three biases, which DeepSpeed pads to four for two ranks
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    output = engine(torch.ones(1, 1, device=engine.device)).flatten().tolist()
    if any(value != value for value in output):
        print(f"repro: REPRODUCED: {SIGNATURE}: {output} instead of [2.0, 2.0, 2.0]\n", end="", flush=True)
        return 1
    assert output == [2.0, 2.0, 2.0], output
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
