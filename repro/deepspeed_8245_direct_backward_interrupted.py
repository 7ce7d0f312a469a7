"""After an exception in loss.backward(), DeepSpeed never reduces the next backward, and step() raises KeyError: 0.

id: 8245-direct
engine: deepspeed
symptom: step() raises KeyError: 0 after a backward that raised and a backward that did not
reported: https://github.com/deepspeedai/DeepSpeed/pull/8245
affects: >=0.19.6
fixed: not yet
ranks: 1
law: backward.abort_and_retry
signature: KeyError: 0
ok: repro: training on after an interrupted loss.backward() at ZeRO stage 1 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_8245_direct_backward_interrupted.py

The engine counts how many backwards are nested, and never removes the interrupted backward from this count. So the
engine treats the next backward as a nested one, whose end reduces nothing. The bug came with 0.19.6, which brought
#8245; 0.18.6 to 0.19.5 are right. Stages 1 to 3 have the bug. At stage 3 on a CPU optimizer.zero_grad() raises earlier
(8245-zero3), and engine.zero_grad() leads to this error. The law checkpointing.exception, in which a recomputation
raises, shows the bug too.

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

SIGNATURE = "KeyError: 0"
OK = "repro: training on after an interrupted loss.backward() at ZeRO stage 1 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
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
        engine(x).sum().backward()
    handle.remove()
    engine.optimizer.zero_grad()
    engine(x).sum().backward()
    try:
        engine.step()
    except KeyError as error:
        if f"KeyError: {error}" != SIGNATURE:
            raise
        print(f"repro: REPRODUCED: {SIGNATURE} in engine.step()\n", end="", flush=True)
        return 1
    torch.testing.assert_close([old - new.detach() for old, new in zip(before, weights, strict=True)], list(wanted))
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
