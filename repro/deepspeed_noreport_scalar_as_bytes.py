"""deepspeed.initialize raises for a model with a parameter without dimensions.

id: scalar-as-bytes
engine: deepspeed
symptom: deepspeed.initialize raises for a scalar parameter, which PyTorch trains
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 1
law: parameters.every_kind
signature: self.dim() cannot be 0 to view Float as Byte
ok: repro: a scalar parameter trains at ZeRO stage 1 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_scalar_as_bytes.py

At the start the engine broadcasts the bytes of every parameter, `p.data.view(torch.uint8)` (`_broadcast_model`). A
tensor without dimensions has no such view. The bug is new in 0.19.8. A learnt temperature or scale is such a parameter.

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
from deepspeed.utils import safe_get_full_grad

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "self.dim() cannot be 0 to view Float as Byte"
OK = "repro: a scalar parameter trains at ZeRO stage 1 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, x):
        return x * self.scale


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model, inputs = Scaled().to(device), torch.ones(1, 2).to(device)
    (wanted,) = torch.autograd.grad(model(inputs).sum(), model.scale)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    engine.backward(engine(inputs).sum())
    torch.testing.assert_close(safe_get_full_grad(model.scale), wanted)
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
