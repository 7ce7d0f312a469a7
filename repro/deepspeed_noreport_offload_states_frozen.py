"""At ZeRO stage 3, offload_states() raises for a model with a frozen weight.

id: offload-states-frozen
engine: deepspeed
symptom: offload_states() at ZeRO stage 3 raises if a weight of the model is frozen
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 2
law: access.read_shard
signature: offload_states() of a model with a frozen weight raised
ok: repro: offload_states() with a frozen weight OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_offload_states_frozen.py

offload_states() treats the partitions of all weights of the module as consecutive parts of lp_param_buffer, but that
buffer has only the partitions of the trained weights (deepspeed/runtime/zero/stage3.py). A LoRA model has frozen
weights.

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

SIGNATURE = "offload_states() of a model with a frozen weight raised"
OK = "repro: offload_states() with a frozen weight OK."


def build_engine():
    # Without this threshold, every rank keeps all weights of so small a model unsharded.
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    model = model.to(deepspeed.accelerator.get_accelerator().current_device_name())
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def main():
    deepspeed.init_distributed()
    kinds = importlib.import_module("deepspeed.runtime.zero.offload_config").OffloadStateTypeEnum
    engine = build_engine()
    engine.backward(engine(torch.ones(1, 2, device=engine.device)).sum())
    engine.step()
    try:
        engine.offload_states(include=[kinds.lp_params], pin_memory=False)
    except RuntimeError as error:
        if "exceeds dimension size" not in str(error):
            raise
        print(f"repro: REPRODUCED: {SIGNATURE}: {error}\n", end="", flush=True)
        return 1
    engine.reload_states()
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
