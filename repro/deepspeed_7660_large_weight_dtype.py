"""The backward raises for a weight larger than a bucket if communication_data_type is not the model's dtype.

id: 7660
engine: deepspeed
symptom: ZeRO 1 and 2 with communication_data_type and a weight larger than reduce_bucket_size: backward raises
reported: https://github.com/deepspeedai/DeepSpeed/pull/7660
affects: ==0.18.1
fixed: 0.18.2
broken: 0.18.1
ranks: 1
law: training.grads
signature: a weight larger than a bucket was not found
ok: repro: a weight larger than a bucket, reduced in bf16 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_7660_large_weight_dtype.py

DeepSpeed stores such a weight under the dtype of the weight, and looks it up under the dtype of the communication.

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

SIGNATURE = "a weight larger than a bucket was not found"
OK = "repro: a weight larger than a bucket, reduced in bf16 OK."

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "communication_data_type": "bf16",
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 2},
}


def main():
    deepspeed.init_distributed()
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    try:
        engine.backward(engine(torch.ones(1, 4, device=engine.device)).sum())
        engine.step()
    except (IndexError, KeyError, RuntimeError) as error:
        print(f"repro: REPRODUCED: {SIGNATURE}: {type(error).__name__}: {error}\n", end="", flush=True)
        return 1
    assert engine.module.weight.tolist() == [[-1.0] * 4], engine.module.weight.tolist()
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
