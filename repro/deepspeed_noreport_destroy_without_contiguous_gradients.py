"""At ZeRO stage 3 destroy() raises if the option contiguous_gradients is false.

id: destroy-without-contiguous-gradients
engine: deepspeed
symptom: destroy() raises AttributeError: no attribute '_DeepSpeedZeroOptimizer_Stage3__ipg_bucket_flat_buffer'
reported: no report known
affects: ==0.16.4
fixed: 0.18.8
broken: 0.16.4
ranks: 1
law: training.config_invariance
signature: has no attribute '_DeepSpeedZeroOptimizer_Stage3__ipg_bucket_flat_buffer'
ok: repro: destroy without contiguous gradients OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_destroy_without_contiguous_gradients.py

destroy() deletes a buffer that exists only with contiguous gradients.

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

SIGNATURE = "has no attribute '_DeepSpeedZeroOptimizer_Stage3__ipg_bucket_flat_buffer'"
OK = "repro: destroy without contiguous gradients OK."

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 3, "contiguous_gradients": False},
}


def main():
    deepspeed.init_distributed()
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    try:
        engine.destroy()
    except AttributeError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
