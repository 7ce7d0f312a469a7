"""No checkpoint of stage 3 contains a weight that was frozen in initialize and unfrozen later.

id: unfrozen-not-saved
engine: deepspeed
symptom: stage 3: load_checkpoint silently leaves a weight unchanged that was unfrozen after initialize
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 1
law: state.several_saves
signature: , and 1.0 was saved
ok: repro: the loaded weight is that of the checkpoint OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_unfrozen_not_saved.py

save_checkpoint writes the weights that the optimizer has, and the weights that do not require a gradient at the time. A
weight that was frozen when the engine was built is not among the optimizer's weights. After the caller unfreezes it, it
is not among the frozen weights either.

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

OK = "repro: the loaded weight is that of the checkpoint OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def build(value):
    """Return an engine with two layers; the second layer is frozen until the engine is built."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, bias=False))
    nn.init.constant_(model[1].weight, value)
    model[1].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    model[1].requires_grad_(True)
    return engine


def main():
    deepspeed.init_distributed()
    saving, loading = build(1.0), build(2.0)
    with tempfile.TemporaryDirectory() as folder:
        saving.save_checkpoint(folder)
        loading.load_checkpoint(folder)
    weight = loading.module[1].weight
    with deepspeed.zero.GatheredParameters([weight]):
        found = weight.item()
    if found != 1.0:
        print(f"repro: REPRODUCED: the loaded weight is {found}, and 1.0 was saved\n", end="", flush=True)
        return 1
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
