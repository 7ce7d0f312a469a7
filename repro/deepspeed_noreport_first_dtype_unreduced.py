"""ZeRO-1 does not reduce fp32 gradients if the optimizer's first parameter is bf16, such as a frozen LoRA weight.

id: first-dtype-unreduced
engine: deepspeed
symptom: silent: at ZeRO stage 1 ranks diverge if the first parameter is bf16 and frozen and the others are fp32
reported: no report known
affects: >=0.16.4,<=0.19.7
fixed: 0.19.8
broken: 0.19.5
ranks: 2
law: precision.weights_of_two_dtypes
signature: the gradient of each rank alone
ok: repro: a frozen bf16 weight before a trained fp32 one at ZeRO stage 1 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_first_dtype_unreduced.py

DeepSpeed uses the dtype of the optimizer's first parameter as the dtype of all. Gradients accumulate in another dtype,
fp32, and get_gradient_for_reduction() (runtime/zero/stage_1_and_2.py) casts them, so DeepSpeed reduces a copy and not
the gradient itself.

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

SIGNATURE = "the gradient of each rank alone"
OK = "repro: a frozen bf16 weight before a trained fp32 one at ZeRO stage 1 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}


class TwoDtypeModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(4, dtype=torch.bfloat16), requires_grad=False)
        self.trained = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return ((self.frozen + self.trained) * x).sum()


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = TwoDtypeModel().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    engine.backward(engine(1.0 + 2.0 * torch.distributed.get_rank()))
    grad = safe_get_full_grad(engine.module.trained).tolist()
    if grad == [1.0, 1.0, 3.0, 3.0]:  # a rank owns one half, for which it has its own gradient
        print(f"repro: REPRODUCED: {SIGNATURE}: {grad} instead of [2.0, 2.0, 2.0, 2.0]\n", end="", flush=True)
        return 1
    assert grad == [2.0, 2.0, 2.0, 2.0], grad
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
