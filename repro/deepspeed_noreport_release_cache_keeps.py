"""At ZeRO stage 3, a cache on a method keeps a trained engine and its module alive until the process ends.

id: release-cache-keeps
engine: deepspeed
symptom: memory grows with every engine that was trained and destroyed in one process
reported: no report known
affects: >=0.16.4
fixed: not yet
ranks: 1
law: resources.no_leak
signature: the module is alive after training and destroy() at ZeRO stage 3
ok: repro: the module is gone after training and destroy() at ZeRO stages 2 and 3 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_release_cache_keeps.py

`PartitionedParameterCoordinator.__params_to_release` is a method under `functools.lru_cache(maxsize=None)`. The cache
lives as long as the class, and holds the coordinator and every module that the method was called with. DeepSpeed calls
the method first in the second step. The script clears the list of #7204 (`FWD_MODULE_STACK`). An engine that was not
trained is deallocated; the script checks this first.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import gc
import importlib
import os
import sys
import weakref

import torch
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))  # DeepSpeed's CPU accelerator asks for it

import deepspeed

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "the module is alive after training and destroy() at ZeRO stage 3"
OK = "repro: the module is gone after training and destroy() at ZeRO stages 2 and 3 OK."


def config(stage):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


def alive_after_destroy(stage, steps, device):
    """Return whether the module is still referenced after its engine was destroyed and the caller dropped both."""
    model = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config(stage))[0]
    for _ in range(steps):
        engine.backward(engine(torch.ones(1, 4, device=device)).sum())
        engine.step()
    engine.destroy()
    importlib.import_module("deepspeed.runtime.zero.parameter_offload").FWD_MODULE_STACK.clear()
    module = weakref.ref(model)
    del engine, optimizer, model
    gc.collect()
    return module() is not None


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    assert not alive_after_destroy(2, 3, device), "the module is alive at stage 2 too"
    assert not alive_after_destroy(3, 0, device), "the module is alive without training too"
    if alive_after_destroy(3, 3, device):
        print(f"repro: REPRODUCED: {SIGNATURE}\n", end="", flush=True)
        return 1
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
