"""autograd.grad with a batch of gradients raises for a layer that AutoTP splits.

id: tp-batched-gradients
engine: deepspeed
symptom: with AutoTP, autograd.grad(is_grads_batched=True) raises "Batching rule not implemented"
reported: no report known
affects: ==0.19.8
fixed: not yet
ranks: 2
law: backward.autograd_grad
signature: Batching rule not implemented for c10d::allreduce_
ok: repro: a batch of gradients with AutoTP OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_tp_batched_gradients.py

A batch of gradients runs the backward under vmap, and the all-reduce in the backward of a column-wise layer has no vmap
rule.

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

SIGNATURE = "Batching rule not implemented for c10d::allreduce_"
OK = "repro: a batch of gradients with AutoTP OK."
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


def jacobian(model, x):
    """Return the Jacobian of the first sample's outputs with respect to all inputs."""
    leaf = x.clone().requires_grad_()
    output = model(leaf)[0]
    return torch.autograd.grad(output, leaf, torch.eye(len(output), device=x.device), is_grads_batched=True)[0]


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = Model().to(device)
    for param in model.parameters():
        nn.init.ones_(param)
    x = torch.ones(1, 2, device=device)
    wanted = jacobian(model, x)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    try:
        got = jacobian(engine.module, x)  # the engine itself raises in autograd.grad at stage 0
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {' '.join(str(error).split())}\n", end="", flush=True)
        return 1
    torch.testing.assert_close(got, wanted)
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
