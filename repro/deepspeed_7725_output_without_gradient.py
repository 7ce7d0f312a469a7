"""The backward raises if an output of the model gets no gradient.

id: 7725
engine: deepspeed
symptom: ZeRO stages 1 to 3: unsupported operand type(s) for /: 'NoneType' and 'int' in backward
reported: https://github.com/deepspeedai/DeepSpeed/issues/7708
affects: ==0.18.3
fixed: 0.18.4
broken: 0.18.3
ranks: 1
law: backward.outputs
signature: unsupported operand type(s) for /: 'NoneType' and 'int'
ok: repro: an output without a gradient OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_7725_output_without_gradient.py

A hook on every output of the forward divides the gradient of the output by the accumulation steps. The hook does not
expect that this gradient can be None.

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

SIGNATURE = "unsupported operand type(s) for /: 'NoneType' and 'int'"
OK = "repro: an output without a gradient OK."

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}


class GradientStop(torch.autograd.Function):
    """Return two tensors of one autograd node, and no gradient for the input."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


class Model(nn.Linear):
    def forward(self, x):
        output = super().forward(x)
        return output, GradientStop.apply(output)


def main():
    deepspeed.init_distributed()
    model = Model(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    output, rest = engine(torch.ones(1, 1, device=engine.device))
    try:
        engine.backward(output.sum() + GradientStop.apply(rest).sum())
    except TypeError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
