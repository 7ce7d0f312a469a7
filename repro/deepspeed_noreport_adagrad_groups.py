"""ZeRO 1 and 2 rebuild torch's Adagrad as one group with its default options, so parameter groups lose their own.

id: adagrad-groups
engine: deepspeed
symptom: a parameter group of torch.optim.Adagrad steps with the default learning rate instead of its own
reported: no report known
affects: ==0.19.8
fixed: not yet
ranks: 1
law: training.optimizer_options
signature: moved the weight by
ok: repro: Adagrad's group has its learning rate OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_adagrad_groups.py

torch.optim.Adagrad makes its state when it is built. initialize_optimizer_states (stage_1_and_2.py) replaces it by a
new Adagrad of all flat partitions with optimizer.defaults. With two groups the next backward raises IndexError. A
schedule that the caller has made for the old optimizer does not change the learning rates of the new one.

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

# Skip DeepSpeed's all-reduce in shared memory, which has to be compiled; plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "moved the weight by"
OK = "repro: Adagrad's group has its learning rate OK."
DEFAULT_RATE, RATE = 1.0, 0.25


def main() -> int:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
    }
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    layer = nn.Linear(1, 1, bias=False).to(device)
    nn.init.zeros_(layer.weight)
    optimizer = torch.optim.Adagrad([{"params": [layer.weight], "lr": RATE}], lr=DEFAULT_RATE)
    engine, *_ = deepspeed.initialize(model=layer, optimizer=optimizer, config=config)
    engine.backward(engine(torch.ones(1, 1, device=device)).sum())
    engine.step()
    moved = abs(float(layer.weight))  # Adagrad's first step moves a weight by its rate
    if moved > 2 * RATE:
        print(f"repro: REPRODUCED: {SIGNATURE} {moved:g}, not by {RATE:g}\n", end="", flush=True)
        return 1
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
