"""After zero.Init, a class without its own __init__ runs the __init__ of its last base class only.

id: 7566
engine: deepspeed
symptom: after deepspeed.zero.Init a model class with a mixin before nn.Module is built without the mixin's __init__
reported: https://github.com/deepspeedai/DeepSpeed/pull/7566
affects: >=0.16.4,<=0.17.5
fixed: 0.17.6
broken: 0.16.4
ranks: 1
law: training.caller_modes
signature: the mixin's __init__ did not run
ok: repro: a class with a mixin after zero.Init OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_7566_init_replaced.py

zero.Init wraps the __init__ of each class that defines one. At the end it restores the old __init__ also on classes
that only inherit theirs. This hides the __init__ that such a class inherits from a base class which is not a module.

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

SIGNATURE = "the mixin's __init__ did not run"
OK = "repro: a class with a mixin after zero.Init OK."

CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)


class Mixin:
    """Add a head to a model, as transformers' GenericForSequenceClassification does."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 2)


class Classifier(Mixin, Base):
    pass


def main():
    deepspeed.init_distributed()
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        Classifier()
    if not hasattr(Classifier(), "head"):
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
