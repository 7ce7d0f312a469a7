"""An engine with torch_autocast changes how all other engines of the process handle their gradients.

id: 7946
engine: deepspeed
symptom: the backward of an engine raises KeyError: torch.bfloat16 if an engine with torch_autocast was built later
reported: https://github.com/deepspeedai/DeepSpeed/pull/7946
affects: >=0.17.6
fixed: not yet
ranks: 1
law: precision.comm_dtype
signature: KeyError: torch.bfloat16
ok: repro: an engine beside one with torch_autocast, at ZeRO stage 1 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_7946_other_engines_autocast.py

A global variable of the process (TORCH_AUTOCAST_INITIALIZED) records that autocast is on. The older engine made its
buckets for its own communication_data_type, fp32, and now asks for a bucket in its parameters' dtype. An engine that is
built after the engine with torch_autocast raises nothing, and ignores its communication_data_type. Stages 1 to 3 have
the bug; #7946 is open.

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

SIGNATURE = "KeyError: torch.bfloat16"
OK = "repro: an engine beside one with torch_autocast, at ZeRO stage 1 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}
IN_BF16 = {**CONFIG, "bf16": {"enabled": True}, "communication_data_type": "fp32"}
WITH_AUTOCAST = {**CONFIG, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


def new_engine(config, device):
    model = nn.Linear(2, 1, bias=False).to(device)
    nn.init.constant_(model.weight, 16.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    x = torch.tensor([[1.0, 3.0]], device=device, dtype=torch.bfloat16)

    engine = new_engine(IN_BF16, device)
    new_engine(WITH_AUTOCAST, device)
    loss = engine(x).sum()
    try:
        engine.backward(loss)
    except KeyError as error:
        if f"KeyError: {error}" != SIGNATURE:
            raise
        print(f"repro: REPRODUCED: {SIGNATURE}\n", end="", flush=True)
        return 1
    engine.step()
    # At a learning rate of 1 SGD moves the weight by its gradient, which is x.
    torch.testing.assert_close(16 - engine.module.weight.detach(), x)
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
