"""After a step, safe_get_full_optimizer_state raises for parameters of the second parameter group.

id: state-of-later-groups
engine: deepspeed
symptom: stages 1 and 2, two parameter groups: ValueError: exp_avg not found in optimizer state fragment
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 1
law: access.read_state
signature: exp_avg not found in optimizer state fragment
ok: repro: safe_get_full_optimizer_state returns the state of both parameter groups OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_state_of_later_groups.py

DeepSpeed links optimizer state to parameters only once, when the first group has stepped and the other groups have no
state yet. Stage 2 does the same.

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
from deepspeed.utils import safe_get_full_optimizer_state

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "exp_avg not found in optimizer state fragment"
OK = "repro: safe_get_full_optimizer_state returns the state of both parameter groups OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}


def main():
    deepspeed.init_distributed()
    model = nn.Linear(1, 1)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    engine.backward(engine(torch.ones(1, 1, device=engine.device)).sum())
    engine.step()
    assert safe_get_full_optimizer_state(engine.module.weight, "exp_avg") is not None
    try:
        found = safe_get_full_optimizer_state(engine.module.bias, "exp_avg")
    except ValueError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    assert found is not None
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
