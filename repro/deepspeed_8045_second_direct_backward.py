"""DeepSpeed never reduces the second loss.backward() on a retained graph, so the step uses the first loss's gradient.

id: 8045
engine: deepspeed
symptom: after two loss.backward() calls on one forward with zero_grad between them, the step uses the first gradient
reported: https://github.com/deepspeedai/DeepSpeed/pull/8045
affects: >=0.18.3
fixed: not yet
ranks: 1
law: double_backward.retained_then_zero_grad
signature: the gradient of the first loss
ok: repro: two losses on one forward, two loss.backward() calls, at ZeRO stage 1 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_8045_second_direct_backward.py

The failure is silent, at stages 1 and 2. engine.scale(loss).backward() does the same, and engine.backward(loss) is
right. The hook on the engine's output, which begins a backward of the engine, runs once for each forward.

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

OK = "repro: two losses on one forward, two loss.backward() calls, at ZeRO stage 1 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}


def two_losses(output):
    return output.sum(), output.square().sum()


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = nn.Linear(2, 1, bias=False).to(device)
    nn.init.ones_(model.weight)
    x = torch.tensor([[1.0, 3.0]], device=device)
    of_first, wanted = (torch.autograd.grad(loss, model.weight, retain_graph=True)[0] for loss in two_losses(model(x)))
    before = model.weight.detach().clone()

    # At a learning rate of 1 SGD moves the weight by its gradient.
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    first, second = two_losses(engine(x))
    first.backward(retain_graph=True)
    engine.optimizer.zero_grad()
    second.backward()
    engine.step()
    moved = before - model.weight.detach()
    if torch.equal(moved, of_first):
        used = f"the step used {moved.tolist()}, the gradient of the first loss, instead of {wanted.tolist()}"
        print(f"repro: REPRODUCED: {used}\n", end="", flush=True)
        return 1
    torch.testing.assert_close(moved, wanted)
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
