"""ZeRO-2 and 3 raise if a loss runs a backward over one of the model's layers inside its own forward.

id: backward-inside-forward
engine: deepspeed
symptom: "has already been reduced" from a loss whose forward calls torch.autograd.backward for each tile
reported: no report known
affects: >=0.17.6
fixed: not yet
ranks: 1
law: backward.backward_in_forward
signature: has already been reduced
ok: repro: a tiled loss with its own backward at ZeRO stage 2 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_backward_inside_forward.py

The hooks reduce the layer's gradient at each of the inner backwards. DeepSpeed's own TiledFusedLogitsLoss (#7437) tells
the hooks by an attribute, ds_grad_is_ready, when the gradient is complete. Any other tiled loss raises this error.
Stage 3 raises an AssertionError without a message.

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

SIGNATURE = "has already been reduced"
OK = "repro: a tiled loss with its own backward at ZeRO stage 2 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 2},
}


class TiledSum(torch.autograd.Function):
    """Compute head(hidden).sum() and its gradient one row at a time."""

    @staticmethod
    def forward(ctx, hidden, head):
        total, grads = 0.0, []
        for row in hidden.split(1):
            with torch.enable_grad():
                leaf = row.detach().requires_grad_()
                loss = head(leaf).sum()
                loss.backward()
            total, grads = total + loss.detach(), [*grads, leaf.grad]
        ctx.save_for_backward(torch.cat(grads))
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 2, bias=False)
        self.head = nn.Linear(2, 1, bias=False)

    def forward(self, x):
        return TiledSum.apply(self.body(x), self.head)


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = Model().to(device)
    weights = [model.body.weight, model.head.weight]
    for weight in weights:
        nn.init.ones_(weight)
    x = torch.tensor([[1.0, 3.0], [2.0, 5.0]], device=device)
    wanted = torch.autograd.grad(model.head(model.body(x)).sum(), weights)
    before = [weight.detach().clone() for weight in weights]

    # At a learning rate of 1 SGD moves a weight by its gradient.
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    try:
        engine.backward(engine(x))
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
