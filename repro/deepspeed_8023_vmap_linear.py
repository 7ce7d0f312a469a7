"""torch.func.vmap raises over the linear layer with which ZeRO-3 replaces torch.nn.functional.linear.

id: 8023
engine: deepspeed
symptom: torch.func.vmap over zero3_linear_wrap raises "must override the setup_context staticmethod"
reported: https://github.com/deepspeedai/DeepSpeed/pull/8023
affects: <=0.19.0
fixed: 0.19.1
broken: 0.19.0
ranks: 1
law: torch_func.inside_forward
signature: no vmap over zero3_linear_wrap:
ok: repro: vmap over zero3_linear_wrap (LinearFunctionForZeroStage3) OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_8023_vmap_linear.py

There are two causes, and the first hides the second: the function has no setup_context (#7913, fixed by #7916), and it
has no rule for vmap (fixed by #8023). Both fixes came with 0.19.1, so releases show the first error, and only a
checkout between the two fixes shows the second.

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

SIGNATURE = "no vmap over zero3_linear_wrap:"
CAUSES = ("must override the setup_context staticmethod", "does not have vmap support")
OK = "repro: vmap over zero3_linear_wrap (LinearFunctionForZeroStage3) OK."


def each_row(linear):
    """Return the outputs of the layer for single rows of its input, with one weight and bias for all rows."""
    return torch.func.vmap(linear, in_dims=(0, None, None))


def main():
    device = get_accelerator().current_device_name()
    torch.manual_seed(0)
    tensors = [torch.randn(8, 4).to(device), torch.randn(5, 4).to(device), torch.randn(5).to(device)]
    wanted = each_row(F.linear)(*tensors)
    try:
        output = each_row(zero3_linear_wrap)(*tensors)
    except RuntimeError as error:
        if not any(cause in str(error) for cause in CAUSES):
            raise
        print(f"repro: REPRODUCED: {SIGNATURE} {error}\n", end="", flush=True)
        return 1
    torch.testing.assert_close(output, wanted)
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
