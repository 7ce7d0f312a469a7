"""Under ZeRO-3, safe_set_full_fp32_param raises for a parameter whose elements the ranks cannot share evenly.

id: uneven-weight-edited
engine: deepspeed
symptom: setting a weight of 5 elements on 2 ranks raises RuntimeError on the last rank
reported: no report known
affects: >=0.16.4
fixed: not yet
ranks: 2
law: parameters.edited
signature: start (3) + length (3) exceeds dimension size (5)
ok: repro: a weight of 5 elements is set on 2 ranks at ZeRO stage 3 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_uneven_weight_edited.py

Every rank's partition has 3 elements, and the last partition ends with one element of padding. `set_full_hp_param`
(`runtime/zero/stage3.py`) cuts the whole value at partition size x rank and does not pad it. 80 elements over 2 ranks
are right.

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
from deepspeed.utils import safe_get_local_fp32_param, safe_set_full_fp32_param

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "start (3) + length (3) exceeds dimension size (5)"
OK = "repro: a weight of 5 elements is set on 2 ranks at ZeRO stage 3 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    # Without this threshold, every rank keeps all weights of so small a model unsharded.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def main():
    deepspeed.init_distributed()
    assert torch.distributed.get_world_size() == 2, "this shows on 2 ranks"
    rank, device = torch.distributed.get_rank(), deepspeed.accelerator.get_accelerator().current_device_name()
    model = nn.Linear(5, 1, bias=False).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    value = torch.arange(5.0).reshape(1, 5).to(device)
    try:
        safe_set_full_fp32_param(engine.module.weight, value)
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    # Read this rank's own part, which needs no collective: the other rank may have ended.
    wanted = value.flatten()[3 * rank : 3 * rank + 3]
    found = safe_get_local_fp32_param(engine.module.weight).flatten()[: len(wanted)]
    assert torch.equal(found, wanted), f"rank {rank} has {found.tolist()}; expected {wanted.tolist()}"
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
