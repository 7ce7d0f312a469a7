"""AutoTP silently replaces a subclass of Linear by its own layer, so the subclass's forward never runs.

id: tp-subclass-forward
engine: deepspeed
symptom: with AutoTP, outputs and gradients are those of nn.Linear, not those of the model's subclass
reported: no report known
affects: ==0.19.8
fixed: not yet
ranks: 2
law: training.clip_wide
signature: the forward of nn.Linear
ok: repro: the forward of a subclass of Linear OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_tp_subclass_forward.py

The layer "up" scales its input. AutoTP makes its own layer from the weight and the bias of each module that a layer
spec names, and ignores the module's class (_replace_with_config in module_inject/auto_tp.py). In the law, the subclass
casts its input, and the forward fails with an error about dtypes.

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

SIGNATURE = "the forward of nn.Linear"
OK = "repro: the forward of a subclass of Linear OK."
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


class ScaledLinear(nn.Linear):
    def forward(self, x):
        return super().forward(3 * x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = ScaledLinear(2, 4, bias=False)
        self.down = nn.Linear(4, 2, bias=False)

    def forward(self, x):
        return self.down(self.up(x))


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = Model().to(device)
    for param in model.parameters():
        nn.init.ones_(param)
    x = torch.ones(1, 2, device=device)
    wanted = copy.deepcopy(model)(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    got = engine(x)
    if torch.equal(3 * got, wanted):
        print(f"repro: REPRODUCED: {SIGNATURE}: got {got.tolist()}, expected {wanted.tolist()}\n", end="", flush=True)
        return 1
    torch.testing.assert_close(got, wanted)
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
