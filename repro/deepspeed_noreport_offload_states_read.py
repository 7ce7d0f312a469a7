"""offload_states() and reload_states() at stage 1 lose the link from a weight to its optimizer state.

id: offload-states-read
engine: deepspeed
symptom: safe_get_full_optimizer_state raises TypeError after offload_states() and reload_states()
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 2
law: access.read_state
signature: argument of type 'NoneType' is not iterable
ok: repro: the optimizer state after offload_states() and reload_states() OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_offload_states_read.py

reload_states() links each weight to its master weight again, but not to its optimizer state, which DeepSpeed links only
after the first step. Training is right. Without the two calls safe_get_full_optimizer_state is right too.

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

SIGNATURE = "argument of type 'NoneType' is not iterable"
OK = "repro: the optimizer state after offload_states() and reload_states() OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}


def main():
    deepspeed.init_distributed()
    model = nn.Linear(2, 2).to(deepspeed.accelerator.get_accelerator().current_device_name())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    engine.backward(engine(torch.ones(1, 2, device=engine.device)).sum())
    engine.step()
    engine.offload_states(pin_memory=False)
    engine.reload_states()
    try:
        deepspeed.utils.safe_get_full_optimizer_state(model.weight, "momentum_buffer")
    except TypeError as error:
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
