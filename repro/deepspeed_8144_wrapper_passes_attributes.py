"""At ZeRO stage 3, hooks break if a wrapper forwards unknown attributes to its inner module.

id: 8144
engine: deepspeed
symptom: ZeRO-3 with a wrapper that forwards attributes: 'Linear' object has no attribute 'ds_grads_remaining'
reported: https://github.com/deepspeedai/DeepSpeed/pull/8144
affects: >=0.17.0,<=0.19.2
fixed: 0.19.3
broken: 0.19.1
ranks: 1
law: backward.engine_backward
signature: 'Linear' object has no attribute 'ds_grads_remaining'
ok: repro: a wrapper that passes attributes on OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_8144_wrapper_passes_attributes.py

Before ZeRO-3 adds its hook functions to a module, it asks by hasattr whether the module has them. The wrapper answers
with the hook functions of its inner module, so ZeRO-3 adds none to the wrapper.

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

SIGNATURE = "'Linear' object has no attribute 'ds_grads_remaining'"
OK = "repro: a wrapper that passes attributes on OK."

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
    # Without this threshold, every rank keeps all weights of so small a model unsharded.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


class Wrapper(nn.Module):
    """Forward the lookup of every missing attribute to the wrapped module, as PEFT's models do."""

    def __init__(self, wrapped):
        super().__init__()
        self.wrapped = wrapped
        self.scale = nn.Parameter(torch.ones(2))

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("wrapped"), name)

    def forward(self, inputs):
        return self.scale * self.wrapped(inputs)


def main():
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), Wrapper(nn.Linear(2, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    tokens = torch.ones(1, 2, device=engine.device)
    try:
        engine.backward(engine(tokens).sum())
        engine.step()
    except AttributeError as error:
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
