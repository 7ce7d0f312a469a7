"""After an exception in engine.backward, ZeRO-2 raises in the next backward, even after zero_grad.

id: 8245-engine
engine: deepspeed
symptom: "has already been reduced" in the first backward after a backward that raised
reported: https://github.com/deepspeedai/DeepSpeed/pull/8245
affects: >=0.16.4
fixed: not yet
ranks: 1
law: backward.abort_and_retry
signature: has already been reduced
ok: repro: training on after an interrupted engine.backward() at ZeRO stage 2 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_8245_engine_backward_interrupted.py

The gradients that the interrupted backward has put into a bucket stay marked as reduced. engine.zero_grad() instead of
the optimizer's zero_grad() changes nothing; stage 1 is right. #8245 left this open.

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

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "has already been reduced"
OK = "repro: training on after an interrupted engine.backward() at ZeRO stage 2 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 2},
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
    before = [weight.detach().clone() for weight in weights]

    # At a learning rate of 1 SGD moves a weight by its gradient.
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    handle = model[0].register_forward_hook(interrupt_behind)  # by then the last layer has its gradient
    with suppress(Interrupted):
        engine.backward(engine(x).sum())
    handle.remove()
    engine.optimizer.zero_grad()
    try:
        engine.backward(engine(x).sum())
    except AssertionError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    engine.step()
    torch.testing.assert_close([old - new.detach() for old, new in zip(before, weights, strict=True)], list(wanted))
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
