"""With two losses in each of two accumulated micro-batches, the step uses the last of the four backwards alone.

id: two-losses-accumulated
engine: deepspeed
symptom: the step uses the gradient of the last of four engine.backward calls alone
reported: no report known
affects: >=0.18.3
fixed: not yet
ranks: 1
law: training.several_backwards
signature: the gradient is 4.0
ok: repro: two losses in each of two accumulated micro-batches add up at ZeRO stage 1 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_two_losses_accumulated.py

The engine counts the micro-batches. In the last micro-batch each backward is at the boundary: it reduces, and its
result replaces the earlier result. Stage 2 does the same; bf16 does not help. The documentation of
coalesce_grad_reduction() excludes this use: 'Do not span multiple gradient_accumulation_steps with multiple
with-blocks'. The losses have the gradients 1, 2, 4 and 8. The mean over two micro-batches of their sum is 7.5, and half
of the last gradient is 4. 0.16.4 adds them up; 0.17.6 and 0.18.2 raise TypeError in the last backward.

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
from deepspeed.utils import safe_get_full_grad

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "the gradient is 4.0"
OK = "repro: two losses in each of two accumulated micro-batches add up at ZeRO stage 1 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}
MICRO_BATCHES = ((1.0, 2.0), (4.0, 8.0))  # the factors by which the losses multiply the output


def wanted_gradient(model, inputs):
    """Return the gradients of plain PyTorch for the mean over micro-batches of the sum of the losses."""
    loss = sum(factor * model(inputs).sum() for factors in MICRO_BATCHES for factor in factors) / len(MICRO_BATCHES)
    return torch.autograd.grad(loss, model.weight)[0].item()


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model, inputs = nn.Linear(1, 1, bias=False).to(device), torch.ones(1, 1).to(device)
    wanted = wanted_gradient(model, inputs)

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    for micro_batch, (first, second) in enumerate(MICRO_BATCHES):
        output = engine(inputs)
        engine.backward(first * output.sum(), retain_graph=True)
        engine.backward(second * output.sum())
        if micro_batch == 0:
            engine.step()  # inside the window, so this step moves nothing
    told = f"the gradient is {safe_get_full_grad(model.weight).item()}; plain PyTorch's is {wanted}"
    if SIGNATURE in told:
        print(f"repro: REPRODUCED: {told}\n", end="", flush=True)
        return 1
    assert safe_get_full_grad(model.weight).item() == wanted, told
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
