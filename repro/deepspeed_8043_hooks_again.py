"""At ZeRO stage 3, training fails after unwrap_model_for_generation has registered the hooks again.

id: 8043
engine: deepspeed
symptom: ZeRO-3: IndexError: pop from an empty deque in the forward after unwrap_model_for_generation
reported: https://github.com/deepspeedai/DeepSpeed/pull/8043
affects: >=0.16.4,<=0.19.1
fixed: 0.19.2
broken: 0.19.1
ranks: 1
law: training.modes
signature: pop from an empty deque
ok: repro: a step after unwrap_model_for_generation OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_8043_hooks_again.py

unwrap_model_for_generation removes the hooks of all modules and registers them again with new numbers. The recorded
trace of the model has no entry for the new numbers.

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
from deepspeed.runtime.zero import unwrap_model_for_generation

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "pop from an empty deque"
OK = "repro: a step after unwrap_model_for_generation OK."

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
    # Without this threshold, every rank keeps all weights of so small a model unsharded.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def main():
    deepspeed.init_distributed()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    tokens = torch.ones(1, 2, device=engine.device)
    try:
        for _ in range(3):
            with unwrap_model_for_generation(engine) as unwrapped, torch.no_grad():
                unwrapped.module[0](tokens)  # a part of the model, as if PEFT ran the model in a wrapper
            engine.backward(engine(tokens).sum())
            engine.step()
    except IndexError as error:
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
