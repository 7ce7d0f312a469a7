"""Under torch_autocast, AutoTP's layers with a bias return float32 instead of the dtype of torch.autocast.

id: tp-autocast-bias
engine: deepspeed
symptom: with AutoTP and torch_autocast in bf16, a layer with a bias returns float32
reported: no report known
affects: ==0.19.8
fixed: not yet
ranks: 2
law: precision.autocast_policy
signature: the dtype of a split layer's output
ok: repro: the dtype of a split layer's output OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_tp_autocast_bias.py

torch.autocast runs nn.Linear in bf16 and returns bf16. AutoTP replaces the layer by torch.matmul and ``output + bias``
(add_bias in module_inject/layers.py). Autocast runs the matmul in bf16, but not the addition: the bias is float32, so
the sum is float32 too. All activations after such a layer take twice the memory, until an operation that autocast runs
in bf16.

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

SIGNATURE = "the dtype of a split layer's output"
OK = "repro: the dtype of a split layer's output OK."
SPECS = [
    {"patterns": [r"^up\.weight$"], "partition_type": "column"},
    {"patterns": [r"^down\.weight$"], "partition_type": "row"},
]
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 0},
    "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    "tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": SPECS}},
}


class Model(nn.Module):
    """Two linear layers; the first layer keeps the dtypes of its outputs in ``dtypes``."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(2, 4)
        self.down = nn.Linear(4, 2)
        self.dtypes = []

    def forward(self, x):
        hidden = self.up(x)
        self.dtypes.append(hidden.dtype)
        return self.down(hidden)


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model, x = Model().to(device), torch.ones(1, 2, device=device)
    with torch.autocast(x.device.type, torch.bfloat16):
        model(x)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    engine(x)
    wanted, got = model.dtypes
    if got is not wanted:
        print(f"repro: REPRODUCED: {SIGNATURE}: {got}, not {wanted}\n", end="", flush=True)
        return 1
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
