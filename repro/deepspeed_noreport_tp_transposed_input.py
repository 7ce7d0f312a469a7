"""AutoTP does not sum the gradient of a layer's input over tensor-parallel ranks if the input is transposed.

id: tp-transposed-input
engine: deepspeed
symptom: with AutoTP, layers before a token-mixing layer get the gradient of one tensor-parallel rank alone
reported: no report known
affects: ==0.19.8
fixed: not yet
ranks: 2
law: mesh.training
signature: the gradient before a transposed input
ok: repro: the gradient before a transposed input OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_tp_transposed_input.py

A token-mixing layer transposes its input. At a micro-batch size of 1 the gradient of that input is transposed as well,
and not contiguous. ColumnParallel.backward (module_inject/layers.py) all-reduces ``grad_output.contiguous()``, which is
then a copy, and returns the original, unreduced gradient. DeepSpeed raises nothing.

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

SIGNATURE = "the gradient before a transposed input"
OK = "repro: the gradient before a transposed input OK."
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


class Mixer(nn.Module):
    """Map (1, tokens, channels) to itself, as in an MLP-Mixer: a layer over channels, and a pair over tokens."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.up = nn.Linear(3, 4, bias=False)
        self.down = nn.Linear(4, 3, bias=False)

    def forward(self, x):
        return self.down(self.up(self.first(x).transpose(1, 2))).transpose(1, 2)


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = Mixer().to(device)
    for param in model.parameters():
        nn.init.ones_(param)
    plain = copy.deepcopy(model)
    x = torch.ones(1, 3, 2, device=device)
    plain(x).sum().backward()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    engine.backward(engine(x).sum())
    wanted, got = plain.first.weight.grad, model.first.weight.grad
    if not torch.equal(wanted, got):
        print(f"repro: REPRODUCED: {SIGNATURE}: {got.tolist()}, not {wanted.tolist()}\n", end="", flush=True)
        return 1
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
