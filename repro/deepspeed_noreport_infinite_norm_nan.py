"""If the gradient norm is infinite, clipping at ZeRO stages 1 and 2 turns finite gradients into NaN.

id: infinite-norm-nan
engine: deepspeed
symptom: at stages 1 and 2 with clipping, one infinite gradient makes every weight NaN
reported: no report known
affects: ==0.16.4
fixed: 0.19.8
broken: 0.16.4
ranks: 1
law: values.not_finite
signature: a weight whose gradient is finite became NaN
ok: repro: a finite gradient beside an infinite one is clipped to zero OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_infinite_norm_nan.py

torch.nn.utils.clip_grad_norm_ multiplies by 1 / inf, which is 0: the infinite gradient becomes NaN, and the others
become 0.

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

SIGNATURE = "a weight whose gradient is finite became NaN"
OK = "repro: a finite gradient beside an infinite one is clipped to zero OK."

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = nn.Linear(2, 1, bias=False).to(device)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    engine.backward(engine(torch.tensor([[1.0, torch.inf]], device=device)).sum())
    engine.step()
    weight = float(model.weight[0, 0])
    if weight != weight:
        print(f"repro: REPRODUCED: {SIGNATURE}\n", end="", flush=True)
        return 1
    assert weight == 0, weight
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
