"""After an exception in a backward at ZeRO stage 3, optimizer.zero_grad() raises on a CPU.

id: 8245-zero3
engine: deepspeed
symptom: "unknown parameter type" in optimizer.zero_grad() after a backward that raised
reported: https://github.com/deepspeedai/DeepSpeed/pull/8245
affects: >=0.16.4
fixed: not yet
ranks: 1
law: backward.abort_and_retry
signature: unknown parameter type
ok: repro: zero_grad after an interrupted backward at ZeRO stage 3 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_8245_zero3_zero_grad.py

The interrupted backward leaves gradients on the parameters. zero_grad calls record_stream on these gradients, and
record_stream raises for a tensor on a CPU. The step after two forwards and their two loss.backward() calls raises in
the same way. With engine.zero_grad() instead, the next engine.backward() raises an AssertionError without a message.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import importlib
import os
import sys
from contextlib import suppress

import torch
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))  # DeepSpeed's CPU accelerator asks for it

import deepspeed
from deepspeed.utils import safe_get_full_grad

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "unknown parameter type"
OK = "repro: zero_grad after an interrupted backward at ZeRO stage 3 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    # Without this threshold, every rank keeps all weights of so small a model unsharded, and nothing is freed.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


class Interrupted(Exception):
    pass


def interrupt(grad):
    raise Interrupted


def interrupt_behind(module, inputs, output):
    output.register_hook(interrupt)


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)).to(device)
    weights = list(model.parameters())
    for weight in weights:
        nn.init.ones_(weight)
    x = torch.tensor([[1.0, 3.0]], device=device)
    wanted = torch.autograd.grad(model(x).sum(), weights)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    handle = model[0].register_forward_hook(interrupt_behind)  # by then the last layer has its gradient
    with suppress(Interrupted):
        engine.backward(engine(x).sum())
    handle.remove()
    try:
        engine.optimizer.zero_grad()
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    engine.backward(engine(x).sum())
    torch.testing.assert_close([safe_get_full_grad(weight) for weight in weights], list(wanted))
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
