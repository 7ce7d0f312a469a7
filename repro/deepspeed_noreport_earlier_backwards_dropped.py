"""If several engine.backward() calls precede one step, ZeRO-1 and 2 keep only the gradient of the last one.

id: earlier-backwards-dropped
engine: deepspeed
symptom: three forwards and backwards, one step: the step uses the third gradient instead of the sum
reported: no report known
affects: >=0.18.3
fixed: not yet
ranks: 1
law: training.several_backwards
signature: the gradient of the last backward alone
ok: repro: three engine.backward() calls before one step, at ZeRO stage 1 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_earlier_backwards_dropped.py

The failure is silent, at stages 1 and 2; stages 0 and 3 add the gradients, as PyTorch does.
set_gradient_accumulation_boundary asks its caller to say which backward of a step is the last one, so this limit is
documented; but DeepSpeed gives no warning. 0.17.6 and 0.18.2 raise a TypeError, 0.16.4 is right.

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

OK = "repro: three engine.backward() calls before one step, at ZeRO stage 1 OK."
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
    inputs = [torch.tensor([row], device=device) for row in ([1.0, 2.0], [10.0, 20.0], [100.0, 200.0])]
    grads = [torch.autograd.grad(model(x).sum(), model.weight)[0] for x in inputs]
    before = model.weight.detach().clone()

    # At a learning rate of 1 SGD moves the weight by its gradient.
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    for x in inputs:
        engine.backward(engine(x).sum())
    engine.step()
    moved = before - model.weight.detach()
    if torch.equal(moved, grads[-1]):
        used = f"the step used {moved.tolist()}, the gradient of the last backward alone, not {sum(grads).tolist()}"
        print(f"repro: REPRODUCED: {used}\n", end="", flush=True)
        return 1
    torch.testing.assert_close(moved, sum(grads))
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
