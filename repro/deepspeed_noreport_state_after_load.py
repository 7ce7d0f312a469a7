"""After load_checkpoint, safe_get_full_optimizer_state raises for every parameter.

id: state-after-load
engine: deepspeed
symptom: stages 1 and 2: safe_get_full_optimizer_state raises TypeError after load_checkpoint into a used engine
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 1
law: access.after_change
signature: argument of type 'NoneType' is not iterable
ok: repro: safe_get_full_optimizer_state returns the loaded state OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_state_after_load.py

The load links every weight again, but without its optimizer state. A flag still says that the states are linked.

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
from deepspeed.utils import safe_get_full_optimizer_state

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "argument of type 'NoneType' is not iterable"
OK = "repro: safe_get_full_optimizer_state returns the loaded state OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}


def main():
    deepspeed.init_distributed()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    engine.backward(engine(torch.ones(1, 1, device=engine.device)).sum())
    engine.step()
    assert safe_get_full_optimizer_state(engine.module.weight, "exp_avg") is not None
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder)
        engine.load_checkpoint(folder)
    try:
        found = safe_get_full_optimizer_state(engine.module.weight, "exp_avg")
    except TypeError as error:
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
