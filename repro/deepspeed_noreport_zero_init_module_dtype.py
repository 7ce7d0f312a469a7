"""zero.Init(module=model) leaves the weights of a model in fp32 although the configuration enables bf16.

id: zero-init-module-dtype
engine: deepspeed
symptom: zero.Init(module=model) leaves fp32 weights under bf16, so the forward refuses bf16 inputs
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 1
law: precision.master_weights
signature: zero.Init(module=model) left the weights in another dtype
ok: repro: zero.Init(module=model) gives the dtype of a model that is built within it OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_zero_init_module_dtype.py

The docstring of zero.Init says of "module": "partition the model as if it was constructed in the context". In the
context, weights get the dtype of the configuration. zero.Init does not cast the weights of an existing module, and
deepspeed.initialize does not cast weights that are already partitioned.

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

SIGNATURE = "zero.Init(module=model) left the weights in another dtype"
OK = "repro: zero.Init(module=model) gives the dtype of a model that is built within it OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,
}


def build(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]


def main():
    deepspeed.init_distributed()
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        within = nn.Linear(2, 2)
    existing = nn.Linear(2, 2)
    with deepspeed.zero.Init(module=existing, config_dict_or_path=CONFIG):
        pass
    dtypes = [build(model).module.weight.dtype for model in (existing, within)]
    if dtypes[0] != dtypes[1]:
        print(f"repro: REPRODUCED: {SIGNATURE}: {dtypes[0]}, expected {dtypes[1]}\n", end="", flush=True)
        return 1
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
