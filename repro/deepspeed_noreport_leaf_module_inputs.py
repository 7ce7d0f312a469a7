"""Stage 3 reduces a leaf module before its gradients exist if the inputs of the module need no gradient.

id: leaf-module-inputs
engine: deepspeed
symptom: backward crashes at stage 3 if a leaf module is the first layer
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 2
law: training.grads
signature: backward of a leaf module whose inputs need no gradient
ok: repro: a leaf module of stage 3 without gradients of its inputs OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_leaf_module_inputs.py

A register_full_backward_hook ends the backward of a leaf module, and torch runs this hook early if no input needs a
gradient. A stage3_module_granularity_threshold above the granularity of the whole model turns the whole model into such
a leaf module.

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

SIGNATURE = "backward of a leaf module whose inputs need no gradient"
OK = "repro: a leaf module of stage 3 without gradients of its inputs OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
}


def build(model, zero, optimizer=None, **options):
    config = {**CONFIG, **options, "zero_optimization": zero}
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


class Block(nn.Module):
    """Two linear layers, which are one leaf module."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, x):
        return self.two(self.one(x))


def main():
    deepspeed.init_distributed()
    wrong = []
    for needs_grad in (True, False):
        model = nn.Sequential(Block(), nn.Linear(2, 1, bias=False))
        deepspeed.utils.set_z3_leaf_modules(model, [Block])
        engine = build(model, {"stage": 3, "stage3_param_persistence_threshold": 0})
        try:
            engine.backward(engine(torch.ones(1, 2, requires_grad=needs_grad)).sum())
        except RuntimeError as error:
            assert not needs_grad
            wrong.append(str(error))
    if wrong:
        print(f"repro: REPRODUCED: {SIGNATURE}: {wrong}\n", end="", flush=True)
        return 1
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
