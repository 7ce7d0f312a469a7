"""AutoTP does not sum the gradient of a gradient penalty over tensor-parallel ranks.

id: tp-double-backward
engine: deepspeed
symptom: with AutoTP, layers after a row-wise layer get the gradient penalty of one tensor-parallel rank alone
reported: no report known
affects: ==0.19.8
fixed: not yet
ranks: 2
law: double_backward.gradient_penalty
signature: the gradient of the penalty
ok: repro: a gradient penalty with AutoTP OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_tp_double_backward.py

The backward of a row-wise layer's all-reduce is the identity. In a double backward, the backward of this identity has
to all-reduce, because each rank has a part of the layer's weight. But this backward is the identity, too (RowParallel
in module_inject/layers.py). DeepSpeed raises nothing.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import copy
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

SIGNATURE = "the gradient of the penalty"
OK = "repro: a gradient penalty with AutoTP OK."
SPECS = [
    {"patterns": [r"^up\.weight$"], "partition_type": "column"},
    {"patterns": [r"^down\.weight$"], "partition_type": "row"},
]
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 0},
    "tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": SPECS}},
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.up = nn.Linear(2, 4, bias=False)
        self.down = nn.Linear(4, 2, bias=False)
        self.last = nn.Linear(2, 2, bias=False)

    def forward(self, x):
        return self.last(self.down(self.up(self.first(x))))


def penalty(model, x):
    """Return the square of the gradient of the outputs' sum with respect to the inputs."""
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(leaf).sum(), leaf, create_graph=True)
    return grad.square().sum()


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = Model().to(device)
    for param in model.parameters():
        nn.init.ones_(param)
    plain = copy.deepcopy(model)
    x = torch.ones(1, 2, device=device)
    penalty(plain, x).backward()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    # Use the module alone: at stage 0 the engine refuses every backward but engine.backward(loss).
    penalty(engine.module, x).backward()
    for name in ("first", "last"):  # the layers that AutoTP does not split
        wanted, got = plain.get_submodule(name).weight.grad, model.get_submodule(name).weight.grad
        if got is None or not torch.equal(wanted, got):
            seen = None if got is None else got.tolist()
            print(f"repro: REPRODUCED: {SIGNATURE} of {name}: {seen}, not {wanted.tolist()}\n", end="", flush=True)
            return 1
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
