"""With elastic_checkpoint, load_checkpoint raises for a checkpoint that save_checkpoint wrote for a torch optimizer.

id: elastic-checkpoint-load
engine: deepspeed
symptom: with elastic_checkpoint, load_checkpoint raises an AssertionError without a message
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 1
law: state.resume
signature: load_checkpoint raises AssertionError
ok: repro: a checkpoint with elastic_checkpoint loads OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_elastic_checkpoint_load.py

load_checkpoint looks for the step count in param_groups, where DeepSpeed's own Adam keeps it. torch's optimizers keep
the step count in the state.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import importlib
import os
import sys
import tempfile

import torch
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))  # DeepSpeed's CPU accelerator asks for it

import deepspeed

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "load_checkpoint raises AssertionError"
OK = "repro: a checkpoint with elastic_checkpoint loads OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
}


def build(model, zero, optimizer=None, **options):
    config = {**CONFIG, **options, "zero_optimization": zero}
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def main():
    deepspeed.init_distributed()
    wrong = []
    for stage in (1, 2):
        engines = []
        for _ in range(2):
            model = nn.Linear(2, 2)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
            engines.append(build(model, {"stage": stage, "elastic_checkpoint": True}, optimizer))
        engines[0].backward(engines[0](torch.ones(1, 2)).sum())
        engines[0].step()
        with tempfile.TemporaryDirectory() as folder:
            engines[0].save_checkpoint(folder)
            try:
                engines[1].load_checkpoint(folder)
            except AssertionError:
                wrong.append(f"stage {stage}")
    if wrong:
        print(f"repro: REPRODUCED: {SIGNATURE}: {wrong}\n", end="", flush=True)
        return 1
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
