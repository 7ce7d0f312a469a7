"""After an hpZ engine was destroyed, a later engine without hpZ in the same process keeps secondary weight copies.

id: hpz-outlives-destroy
engine: deepspeed
symptom: after an engine with zero_hpz_partition_size was destroyed, a later engine keeps secondary copies of weights
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 2
law: state.several_saves
signature: an engine without hpZ has secondary copies of weights
ok: repro: no secondary copies without hpZ OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_hpz_outlives_destroy.py

The process group of hpZ is a global variable that destroy() does not reset. A later engine at stage 3 uses this group
for any zero_hpz_partition_size of its own. So the later engine has the memory use and the bugs of hpZ. Under zero.Init
an engine with hpZ raises "ZeRO parameter intra parallel group is already initialized".

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

SIGNATURE = "an engine without hpZ has secondary copies of weights"
OK = "repro: no secondary copies without hpZ OK."


def build_engine(hpz_size):
    # Without this threshold, every rank keeps all weights of so small a model unsharded.
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "zero_hpz_partition_size": hpz_size}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }
    model = nn.Linear(2, 2).to(deepspeed.accelerator.get_accelerator().current_device_name())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def main():
    deepspeed.init_distributed()
    first = build_engine(hpz_size=2)
    tokens = torch.ones(1, 2, device=first.device)
    first.backward(first(tokens).sum())
    first.step()
    first.destroy()
    second = build_engine(hpz_size=1)
    second(tokens)
    if any(parameter.ds_secondary_tensor is not None for parameter in second.module.parameters()):
        print(f"repro: REPRODUCED: {SIGNATURE}\n", end="", flush=True)
        return 1
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
