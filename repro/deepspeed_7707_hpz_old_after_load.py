"""With hpZ at ZeRO stage 3, forwards after load_checkpoint use the weights from before the load.

id: 7707
engine: deepspeed
symptom: silent: with zero_hpz_partition_size, forwards after load_checkpoint use the weights from before the load
reported: https://github.com/deepspeedai/DeepSpeed/pull/7707
affects: >=0.16.4,<=0.18.2
fixed: 0.18.3
broken: 0.17.6
ranks: 2
law: state.several_saves
signature: the output after the load is that of the old weight
ok: repro: a weight after a load with hpZ OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_7707_hpz_old_after_load.py

The first gather of a weight keeps a secondary copy of the weight, and later gathers read this copy. A step invalidates
the copies. A load did not invalidate any copies until 0.18.3, and still does not invalidate the copies of frozen
weights.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import importlib
import os
import shutil
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

SIGNATURE = "the output after the load is that of the old weight"
OK = "repro: a weight after a load with hpZ OK."

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
    # Without this threshold, every rank keeps all weights of so small a model unsharded.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "zero_hpz_partition_size": 2},
}


def build(value):
    model = nn.Linear(2, 2, bias=False)
    nn.init.constant_(model.weight, value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.to(deepspeed.accelerator.get_accelerator().current_device_name())
    return deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]


def main():
    deepspeed.init_distributed()
    folder = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(folder)
    saved, resumed = build(1.0), build(5.0)
    tokens = torch.ones(1, 2, device=saved.device)
    with torch.no_grad():
        saved.save_checkpoint(folder[0])
        old = resumed(tokens).tolist()
        resumed.load_checkpoint(folder[0])
        got = resumed(tokens).tolist()
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(folder[0])
    if got == old:
        print(f"repro: REPRODUCED: {SIGNATURE}: {got} instead of [[2.0, 2.0]]\n", end="", flush=True)
        return 1
    assert got == [[2.0, 2.0]], got
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
