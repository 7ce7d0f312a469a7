"""DeepSpeed treats the pullback of torch.func.vjp over the engine as a backward of a loss.

id: 8026-vjp
engine: deepspeed
symptom: torch.func.vjp over the engine raises, although torch.func.grad works
reported: https://github.com/deepspeedai/DeepSpeed/pull/8026
affects: >=0.18.5
fixed: not yet
ranks: 1
law: torch_func.vjp
signature: list index out of range
ok: repro: torch.func.vjp over the engine gives the gradient of the inputs at ZeRO stage 1 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_8026_vjp_pullback_late.py

#8026 makes the engine's hooks ask whether a transform is running. When the caller calls the pullback, the transform is
over. 0.18.4 is right. Stage 2 fails in the same way, stage 0 with "Direct calls to tensor.backward() are not supported
in this configuration".

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

SIGNATURE = "list index out of range"
OK = "repro: torch.func.vjp over the engine gives the gradient of the inputs at ZeRO stage 1 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}


def input_gradient(function, inputs):
    output, pullback = torch.func.vjp(function, inputs)
    return pullback(torch.ones_like(output))[0]


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    torch.manual_seed(0)
    model, inputs = nn.Linear(4, 3).to(device), torch.randn(1, 4).to(device)
    wanted = input_gradient(model, inputs)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    try:
        found = input_gradient(engine, inputs)
    except IndexError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: IndexError in the pullback: {error}\n", end="", flush=True)
        return 1
    torch.testing.assert_close(found, wanted)
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
