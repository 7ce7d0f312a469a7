"""Weights that ZeRO-3 keeps whole are read before their all-gathers are over: memory that nobody has written.

id: 8539
engine: deepspeed
symptom: now and then, NaN or garbage in the weights after a step at ZeRO stage 3 on gloo
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

One all-gather is started for each parameter, and only the last one's handle is awaited. On gloo they end in any order,
so it is a matter of timing. To leave nothing to that, here each gather is done when its handle is awaited and no
sooner, as a backend may do it, and fresh memory is filled with NaN. The gathers are those with which a step ends, for
the weights up to stage3_param_persistence_threshold: the call is made without an engine, whose imports take longer.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither.
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

# Saves compiling an all-reduce in shared memory, for which the ranks would race; plain gloo does as well.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "weights read from memory that no all-gather has written"
OK = "repro: the gathers that end a step at ZeRO stage 3 OK."
CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


def gather_when_awaited(gather):
    """The collective ``gather`` with a handle that does all of its work in wait()."""

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

    params = list(model.parameters())  # shards now
    deepspeed.comm.all_gather_into_tensor = gather_when_awaited(deepspeed.comm.all_gather_into_tensor)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    params[0].all_gather(params)  # as the end of engine.step() does with all weights that are kept whole
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
