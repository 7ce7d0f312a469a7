"""AutoTP pickles the arguments of the first forward, so a model whose forward takes a function cannot run.

id: tp-argument-pickled
engine: deepspeed
symptom: with AutoTP, a forward that takes a function raises "Can't pickle"
reported: no report known
affects: ==0.19.8
fixed: not yet
ranks: 2
law: backward.outputs
signature: Can't pickle
ok: repro: a function as an argument of the forward OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_tp_argument_pickled.py

In the first forward, AutoTP broadcasts the arguments to the ranks of the tensor-parallel group, and each rank compares
them with its own (check_dataloader_inputs_same_across_ranks in runtime/engine.py). Only the rank that sends raises; the
other ranks wait.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import copy
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

SIGNATURE = "Can't pickle"
OK = "repro: a function as an argument of the forward OK."
SPECS = [
    {"patterns": [r"^up\.weight$"], "partition_type": "column"},
    {"patterns": [r"^down\.weight$"], "partition_type": "row"},
]
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 0},
    "tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": SPECS}},
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(2, 4, bias=False)
        self.down = nn.Linear(4, 2, bias=False)

    def forward(self, x, activation):
        return self.down(activation(self.up(x)))


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = Model().to(device)
    for param in model.parameters():
        nn.init.ones_(param)
    plain = copy.deepcopy(model)
    x, activation = torch.ones(1, 2, device=device), lambda hidden: 2 * hidden
    wanted = plain(x, activation)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    try:
        got = engine(x, activation)
    except Exception as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    torch.testing.assert_close(got, wanted)
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
