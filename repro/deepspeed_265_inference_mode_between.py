"""At ZeRO stage 3, a forward under torch.inference_mode between another forward and its backward breaks this backward.

id: 265
engine: deepspeed
symptom: a backward after an evaluation raises 'NoneType' object has no attribute 'next_functions'
reported: https://github.com/snowflakedb/ArcticTraining/issues/265
affects: >=0.18.3
fixed: not yet
ranks: 1
law: backward.without_grad
signature: 'NoneType' object has no attribute 'next_functions'
ok: repro: an evaluation under inference_mode before the backward at ZeRO stage 3 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_265_inference_mode_between.py

The tensors that inference_mode gathers into the parameters are inference tensors. The hook that counts the parameters
used in this backward finds no grad_fn for them. With torch.no_grad() the backward is right, and with a model of one
layer too. The report is from a project that uses DeepSpeed; no report was found in DeepSpeed's own tracker. Releases up
to 0.18.2 are right.

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

SIGNATURE = "'NoneType' object has no attribute 'next_functions'"
OK = "repro: an evaluation under inference_mode before the backward at ZeRO stage 3 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    # Without this threshold, every rank keeps all weights of so small a model unsharded, and nothing is freed.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).to(device)
    params = list(model.parameters())
    x = torch.tensor([[1.0, 3.0]], device=device)
    wanted = torch.autograd.grad(model(x).sum(), params)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    loss = engine(x).sum()
    try:
        with torch.inference_mode():
            engine(x)
        engine.backward(loss)
    except AttributeError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    torch.testing.assert_close([safe_get_full_grad(param) for param in params], list(wanted))
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
