"""ZeRO stages 1 to 3 replace an infinite gradient norm by 1 and do not clip.

id: infinite-norm-unclipped
engine: deepspeed
symptom: get_global_grad_norm() is 1 if the norm is infinite, and gradient_clipping leaves the gradients unchanged
reported: no report known
affects: >=0.17.0,<=0.19.7
fixed: 0.19.8
broken: 0.19.5
ranks: 1
law: values.not_finite
signature: the norm of an infinite gradient is 1.0
ok: repro: an infinite norm is reported as infinite at ZeRO stages 1 to 3 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_infinite_norm_unclipped.py

DeepSpeed replaces an infinite or NaN norm of a parameter group by -1. The norm over all groups uses the square of this
-1. torch's clip_grad_norm_ returns infinity, and scales all finite gradients to 0.

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

SIGNATURE = "the norm of an infinite gradient is 1.0"
OK = "repro: an infinite norm is reported as infinite at ZeRO stages 1 to 3 OK."


def config(stage):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    for stage in (1, 2, 3):
        model = nn.Linear(2, 1, bias=False).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config(stage))[0]
        engine.backward(engine(torch.tensor([[1.0, torch.inf]], device=device)).sum())
        engine.step()
        norm = float(engine.get_global_grad_norm())
        if norm == 1.0:
            print(f"repro: REPRODUCED: {SIGNATURE}, at stage {stage}\n", end="", flush=True)
            return 1
        assert norm == torch.inf, norm
        engine.destroy()
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
