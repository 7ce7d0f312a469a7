"""With hpZ at ZeRO stage 3, all forwards after load_checkpoint use a frozen weight from before the load.

id: hpz-frozen-after-load
engine: deepspeed
symptom: silent: with zero_hpz_partition_size, forwards after load_checkpoint use a frozen weight from before the load
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 2
law: state.several_saves
signature: the output after the load is that of the old frozen weight
ok: repro: a frozen weight after a load with hpZ OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_hpz_frozen_after_load.py

The first gather of a weight keeps a secondary copy of the weight, and later gathers read this copy. A step and a load
invalidate the copies of the weights that the optimizer has, but not the copies of frozen weights. Without
zero_hpz_partition_size the output is right. GatheredParameters and a checkpoint show the loaded weight.

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

SIGNATURE = "the output after the load is that of the old frozen weight"
OK = "repro: a frozen weight after a load with hpZ OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    # Without this threshold, every rank keeps all weights of so small a model unsharded.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "zero_hpz_partition_size": 2},
}


def build_engine(frozen_value):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(frozen_value)
        model[1].weight.fill_(1.0)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    model.to(deepspeed.accelerator.get_accelerator().current_device_name())
    return deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]


def main():
    deepspeed.init_distributed()
    saved, resumed = build_engine(frozen_value=1.0), build_engine(frozen_value=5.0)
    tokens = torch.ones(1, 2, device=saved.device)
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        torch.distributed.broadcast_object_list(folder)
        saved.save_checkpoint(folder[0])
        expected = saved(tokens)
        old = resumed(tokens)
        resumed.load_checkpoint(folder[0])
        torch.distributed.barrier()
    got = resumed(tokens)
    if torch.equal(got, old) and not torch.equal(got, expected):
        print(f"repro: REPRODUCED: {SIGNATURE}: expected {expected.tolist()}, got {got.tolist()}\n", end="", flush=True)
        return 1
    assert torch.equal(got, expected), got  # small integers, exact
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
