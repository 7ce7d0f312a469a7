"""DeepSpeed never reduces one loss.backward() over two forwards of an engine, and step() raises KeyError: 0.

id: forwards-one-backward
engine: deepspeed
symptom: after one loss.backward() over two forwards, step() raises KeyError: 0
reported: no report known
affects: >=0.19.6
fixed: not yet
ranks: 1
law: backward.recurrent
signature: KeyError: 0
ok: repro: one backward over two forwards at ZeRO stage 1 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_forwards_one_backward.py

Stages 1 to 3 have the bug, and engine(engine(x)), which feeds an output back, shows it too. With engine.backward(loss)
both are right. Each forward's output enters the backward once, so the depth is 2. _backward_post_hook treats a depth
above 1 as an interrupted backward and leaves the reduction out. The bug came with 0.19.6, which brought #8245; 0.18.3
to 0.19.5 are right, and earlier releases reduced no loss.backward() (#7665).

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

SIGNATURE = "KeyError: 0"
OK = "repro: one backward over two forwards at ZeRO stage 1 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = nn.Linear(2, 1, bias=False).to(device)
    nn.init.ones_(model.weight)
    x, y = torch.tensor([[1.0, 2.0]], device=device), torch.tensor([[10.0, 20.0]], device=device)
    (wanted,) = torch.autograd.grad(model(x).sum() + model(y).sum(), model.weight)
    before = model.weight.detach().clone()

    # At a learning rate of 1 SGD moves the weight by its gradient.
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    (engine(x).sum() + engine(y).sum()).backward()
    try:
        engine.step()
    except KeyError as error:
        if f"KeyError: {error}" != SIGNATURE:
            raise
        print(f"repro: REPRODUCED: {SIGNATURE} in engine.step()\n", end="", flush=True)
        return 1
    torch.testing.assert_close(before - model.weight.detach(), wanted)
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
