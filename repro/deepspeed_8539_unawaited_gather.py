"""ZeRO-3 reads unsharded weights before their all-gathers have finished, so it reads uninitialized memory.

id: 8539
engine: deepspeed
symptom: after a step at ZeRO stage 3 on gloo, the weights sometimes contain NaN or garbage
reported: https://github.com/deepspeedai/DeepSpeed/pull/8539
affects: <=0.19.7
fixed: 0.19.8
broken: 0.19.7
ranks: 2
law: resources.poisoned_memory
signature: weights read from memory that no all-gather has written
ok: repro: the gathers that end a step at ZeRO stage 3 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_8539_unawaited_gather.py

DeepSpeed starts one all-gather for each parameter, and waits only for the handle of the last one. On gloo all-gathers
finish in any order, so the failure depends on timing. To make it certain, each gather in this script runs when its
handle is awaited and no sooner, as a backend may do, and fresh memory is filled with NaN. The gathers are those at the
end of a step, for the weights up to stage3_param_persistence_threshold. The script calls them without an engine, whose
imports take longer.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import importlib
import os
import sys
from functools import partial
from types import SimpleNamespace

import torch
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))  # DeepSpeed's CPU accelerator asks for it

import deepspeed

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "weights read from memory that no all-gather has written"
OK = "repro: the gathers that end a step at ZeRO stage 3 OK."
CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


def gather_when_awaited(gather):
    """Return the collective ``gather`` with a handle that does all of its work in wait()."""

    def late(*tensors, async_op=False, **options):
        work = partial(gather, *tensors, **options)
        return SimpleNamespace(wait=work) if async_op else work()

    return late


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    torch.manual_seed(0)
    wanted = [param.detach() for param in nn.Linear(4, 4).to(device).parameters()]
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = nn.Linear(4, 4)

    params = list(model.parameters())  # shards at this point
    deepspeed.comm.all_gather_into_tensor = gather_when_awaited(deepspeed.comm.all_gather_into_tensor)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    params[0].all_gather(params)  # engine.step() ends with this call for all weights that stay unsharded
    weights = [param.detach().clone() for param in params]
    if weights[0].isnan().all() and torch.equal(weights[1], wanted[1]):
        found = f"{weights[0].flatten()[:2].tolist()}... instead of {wanted[0].flatten()[:2].tolist()}..."
        print(f"repro: REPRODUCED: {SIGNATURE}: {found}\n", end="", flush=True)
        return 1
    torch.testing.assert_close(weights, wanted)
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
