"""ZeRO-1 and ZeRO-2 convert all parameters of an optimizer group to the widest of their dtypes.

id: two-dtypes-zero2
engine: deepspeed
symptom: a float32 layer beside a float64 one becomes float64, and a forward on float32 inputs raises RuntimeError
reported: no report known
affects: >=0.16.4
fixed: not yet
ranks: 1
law: parameters.every_kind
signature: the float32 weight is now
ok: repro: a model with parameters of two dtypes keeps them at ZeRO stage 2 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_two_dtypes_zero2.py

DeepSpeed concatenates the trained parameters of a group to one flat tensor, which promotes their dtypes, and turns the
parameters into views of this tensor (`flatten_dense_tensors_aligned`, `runtime/zero/stage_1_and_2.py`). A bf16 layer
beside float32 ones becomes float32. A separate optimizer group for the layer of the other dtype avoids the bug.

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

OK = "repro: a model with parameters of two dtypes keeps them at ZeRO stage 2 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 2},
}


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.narrow, self.wide = nn.Linear(4, 2), nn.Linear(2, 2).double()

    def forward(self, x):
        return self.wide(self.narrow(x).double())


def main():
    deepspeed.init_distributed()
    model = Mixed().to(deepspeed.accelerator.get_accelerator().current_device_name())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    if model.narrow.weight.dtype is not torch.float32:
        print(f"repro: REPRODUCED: the float32 weight is now {model.narrow.weight.dtype}\n", end="", flush=True)
        return 1
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
