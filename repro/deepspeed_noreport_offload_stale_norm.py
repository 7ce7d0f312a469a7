"""With an offloaded optimizer, clipping uses the norm from before safe_set_full_grad replaced the gradient.

id: offload-stale-norm
engine: deepspeed
symptom: DeepSpeed clips a replaced gradient by the norm of the gradient that backward computed
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 1
law: access.write_grad
signature: clipped by the old norm
ok: repro: with an offloaded optimizer clipping uses the gradient that safe_set_full_grad wrote OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_offload_stale_norm.py

DeepSpeed computes the norm of every parameter during backward, when it copies the gradient to the CPU, and
safe_set_full_grad does not compute the norm again. Stages 1 and 3 do the same; safe_set_local_grad of stage 3 does
compute the norm.

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
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_grad

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "clipped by the old norm"
OK = "repro: with an offloaded optimizer clipping uses the gradient that safe_set_full_grad wrote OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 1.0,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}


def main():
    deepspeed.init_distributed()
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 16.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    engine.backward(engine(torch.ones(1, 1, device=engine.device)).sum())
    safe_set_full_grad(engine.module.weight, torch.full((1, 1), 8.0, device=engine.device))
    engine.step()
    moved = 16.0 - safe_get_full_fp32_param(engine.module.weight).item()
    if moved > 4.0:
        print(f"repro: REPRODUCED: {SIGNATURE}: the step is {moved:.4f}, clipping allows 1\n", end="", flush=True)
        return 1
    assert 0.99 < moved <= 1.0, moved
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
