"""Each gradient hook counts all parameters of the backward again, so the work is quadratic in their number.

id: 7885
engine: deepspeed
symptom: training under ZeRO is much slower than with the release before, above all with many parameters
reported: https://github.com/deepspeedai/DeepSpeed/issues/7885
affects: >=0.18.5,<=0.18.6
fixed: 0.18.7
broken: 0.18.6
ranks: 1
law: resources.hook_count
signature: count_used_parameters_in_backward ran once for each of 20 parameters
ok: repro: count_used_parameters_in_backward once in a backward at ZeRO stages 1 to 3 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_7885_count_per_hook.py

The script counts calls, because times say little about so small a model. #7780 added the call; #7886 makes one call per
backward.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import importlib
import os
import sys
from unittest import mock

import torch
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))  # DeepSpeed's CPU accelerator asks for it

import deepspeed

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "count_used_parameters_in_backward ran once for each of 20 parameters"
OK = "repro: count_used_parameters_in_backward once in a backward at ZeRO stages 1 to 3 OK."
OPTIMIZERS = {1: "stage_1_and_2", 2: "stage_1_and_2", 3: "stage3"}
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
}


def calls_in_a_backward(stage, device):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(10))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    loss = engine(torch.ones(1, 2, device=device)).sum()
    module = importlib.import_module(f"deepspeed.runtime.zero.{OPTIMIZERS[stage]}")
    count = module.count_used_parameters_in_backward
    with mock.patch.object(module, count.__name__, wraps=count) as counted:
        engine.backward(loss)
    return counted.call_count


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    calls = {stage: calls_in_a_backward(stage, device) for stage in OPTIMIZERS}
    if all(count == 20 for count in calls.values()):
        print(f"repro: REPRODUCED: {SIGNATURE}: calls by stage {calls}\n", end="", flush=True)
        return 1
    assert all(count == 1 for count in calls.values()), f"calls by stage: {calls}"
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
