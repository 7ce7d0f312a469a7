"""Under ZeRO-3 the first forward raises for a module with a parameter that has no elements.

id: empty-parameter-zero3
engine: deepspeed
symptom: the first forward of a model with an empty parameter raises AssertionError; PyTorch trains the model
reported: no report known
affects: >=0.16.4
fixed: not yet
ranks: 1
law: parameters.every_kind
signature: 'status': 'NOT_AVAILABLE', 'numel': 0, 'ds_numel': 0
ok: repro: a model with an empty parameter trains at ZeRO stage 3 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_empty_parameter_zero3.py

ZeRO-3 never gathers the parameter, because there is nothing to gather, but `fetch_sub_module` asserts that the
parameter was gathered. #8467 (0.19.8) leaves such parameters out of the optimizers' groups; the gather still fails.

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

SIGNATURE = "'status': 'NOT_AVAILABLE', 'numel': 0, 'ds_numel': 0"
OK = "repro: a model with an empty parameter trains at ZeRO stage 3 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    # Without this threshold, every rank keeps all weights of so small a model unsharded.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


class Extended(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.extra = nn.Parameter(torch.zeros(0, 2))

    def forward(self, x):
        return self.linear(x) + self.extra.sum(0)


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model, inputs = Extended().to(device), torch.ones(1, 4).to(device)
    (wanted,) = torch.autograd.grad(model(inputs).sum(), model.linear.weight)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    try:
        output = engine(inputs)
    except AssertionError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: AssertionError in the forward: {error}\n", end="", flush=True)
        return 1
    engine.backward(output.sum())
    torch.testing.assert_close(safe_get_full_grad(model.linear.weight), wanted)
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
