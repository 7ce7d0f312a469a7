"""With ``wall_clock_breakdown``, one loss.backward() over two forwards raises because each forward starts the timer.

id: timers-two-forwards
engine: deepspeed
symptom: with wall_clock_breakdown, a backward of two forwards raises AssertionError "timer has already been started"
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 1
law: backward.recurrent
signature: timer has already been started
ok: repro: one backward of two forwards with wall_clock_breakdown OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_timers_two_forwards.py

A hook of each forward's output starts the timers of a backward, and the end of the backward stops them. The hooks run
once for each forward, so one backward of two forwards starts a timer that already runs. The timers of a flops profiler,
and of a backward that an exception ended, fail in the same way. Without wall_clock_breakdown the backward is right.

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

SIGNATURE = "timer has already been started"
OK = "repro: one backward of two forwards with wall_clock_breakdown OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 2},
    "wall_clock_breakdown": True,
}


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = nn.Linear(2, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    tokens = torch.ones(1, 2, device=device)
    loss = engine(engine(tokens)).sum()
    try:
        loss.backward()
    except AssertionError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {SIGNATURE}\n", end="", flush=True)
        return 1
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
