"""torch.func raises over the linear layer with which ZeRO-3 replaces torch.nn.functional.linear.

id: 7913
engine: deepspeed
symptom: torch.func.grad_and_value over zero3_linear_wrap raises "must override the setup_context staticmethod"
reported: https://github.com/deepspeedai/DeepSpeed/issues/7913
affects: <=0.19.0
fixed: 0.19.1
broken: 0.18.8
ranks: 1
law: torch_func.inside_forward
signature: must override the setup_context staticmethod
ok: repro: grad_and_value over zero3_linear_wrap (LinearFunctionForZeroStage3) OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_7913_torch_func_linear.py

Under ZeRO-3, torch.nn.functional.linear becomes zero3_linear_wrap. If a loss itself uses torch.func, as fused linear
losses and distillation losses do, torch.func then differentiates LinearFunctionForZeroStage3. Fixed by #7916.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import os
import sys

import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.linear import zero3_linear_wrap

SIGNATURE = "must override the setup_context staticmethod"
OK = "repro: grad_and_value over zero3_linear_wrap (LinearFunctionForZeroStage3) OK."


def fused_loss(linear):
    """Return the gradients of hidden, weight and bias by torch.func, for a loss that contains the output layer."""

    def loss(hidden, weight, bias, target):
        return F.cross_entropy(linear(hidden, weight, bias), target)

    return torch.func.grad_and_value(loss, argnums=(0, 1, 2))


def main():
    device = get_accelerator().current_device_name()
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(8, 4), torch.randn(5, 4), torch.randn(5)
    batch = [tensor.to(device) for tensor in (hidden, weight, bias, torch.randint(0, 5, (8,)))]
    wanted_grads, wanted_loss = fused_loss(F.linear)(*batch)
    try:
        grads, loss = fused_loss(zero3_linear_wrap)(*batch)
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    torch.testing.assert_close((grads, loss), (wanted_grads, wanted_loss))
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
