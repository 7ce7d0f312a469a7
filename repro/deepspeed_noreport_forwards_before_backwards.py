"""If two forwards precede their two backwards, ZeRO-3 keeps only the gradient of the second backward.

id: forwards-before-backwards
engine: deepspeed
symptom: two forwards, two engine.backward() calls, one step: the step uses the second gradient instead of the sum
reported: no report known
affects: >=0.18.5
fixed: not yet
ranks: 1
law: backward.two_outputs_two_backwards
signature: the gradient of the second backward alone
ok: repro: two forwards, then their two backwards, at ZeRO stage 3 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_forwards_before_backwards.py

The failure is silent, at stage 3. A count decides whether a gradient is added to the others of its step or replaces
them. The next forward raises this count, so the order forward, backward, forward, backward is right. Inside
engine.coalesce_grad_reduction() two forwards before two backwards are right as well. With loss.backward() DeepSpeed
raises on a CPU (unknown parameter type). Releases up to 0.18.4 are right.

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
from deepspeed.utils import safe_get_full_fp32_param

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

OK = "repro: two forwards, then their two backwards, at ZeRO stage 3 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    # Without this threshold, every rank keeps all weights of so small a model unsharded, and nothing is freed.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = nn.Linear(2, 1, bias=False).to(device)
    nn.init.ones_(model.weight)
    inputs = [torch.tensor([row], device=device) for row in ([1.0, 2.0], [10.0, 20.0])]
    first, second = (torch.autograd.grad(model(x).sum(), model.weight)[0] for x in inputs)
    before = model.weight.detach().clone()

    # At a learning rate of 1 SGD moves the weight by its gradient.
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    for loss in [engine(x).sum() for x in inputs]:
        engine.backward(loss)
    engine.step()
    moved = before - safe_get_full_fp32_param(model.weight)
    if torch.equal(moved, second):
        wanted = (first + second).tolist()
        used = f"the step used {moved.tolist()}, the gradient of the second backward alone, not {wanted}"
        print(f"repro: REPRODUCED: {used}\n", end="", flush=True)
        return 1
    torch.testing.assert_close(moved, first + second)
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
