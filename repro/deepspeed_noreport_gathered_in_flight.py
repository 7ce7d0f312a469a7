"""At ZeRO stage 3, GatheredParameters raises for a weight that an evaluation prefetched and that is still in flight.

id: gathered-in-flight
engine: deepspeed
symptom: reading weights after an evaluation raises AssertionError: Cannot partition a param in flight
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 1
law: training.looked_at
signature: Cannot partition a param in flight
ok: repro: weights read after an evaluation at ZeRO stage 3 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_gathered_in_flight.py

The engine prefetches the weights that the recorded trace of a training step uses next. At the end of a forward, these
are the weights of the backward. After a forward without a backward nothing waits for that gather. With
stage3_allgather_sequential each weight has a gather of its own. GatheredParameters ignores the gather in flight on
entry, and partitions the weight on exit.

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

SIGNATURE = "Cannot partition a param in flight"
OK = "repro: weights read after an evaluation at ZeRO stage 3 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {
        "stage": 3,
        # Without this threshold, every rank keeps all weights of so small a model unsharded, and nothing is freed.
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_allgather_sequential": True,
    },
}


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    x = torch.tensor([[1.0, 3.0]], device=device)
    engine.backward(engine(x).sum())
    engine.step()
    with torch.no_grad():
        engine(x)
    try:
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            pass
    except AssertionError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {SIGNATURE}, from GatheredParameters\n", end="", flush=True)
        return 1
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
