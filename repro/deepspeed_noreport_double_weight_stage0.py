"""At stage 0 on a CPU, the first backward raises for a model with a float64 weight.

id: double-weight-stage0
engine: deepspeed
symptom: the first backward of a model with a float64 weight raises AssertionError; PyTorch trains the model
reported: no report known
affects: >=0.19.5
fixed: not yet
ranks: 2
law: parameters.every_kind
signature: attempting to reduce an unsupported grad type: torch.float64
ok: repro: a model with a float64 weight trains at stage 0 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_double_weight_stage0.py

The reduction accepts the dtypes that the accelerator supports, and the list of a CPU lacks float64
(`split_half_float_double_sparse`, `runtime/engine.py`).

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

SIGNATURE = "attempting to reduce an unsupported grad type: torch.float64"
OK = "repro: a model with a float64 weight trains at stage 0 OK."
CONFIG = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": {"stage": 0}}


class WithDouble(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.wide = nn.Linear(2, 2), nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        return self.first(x) + self.wide.float()


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model, inputs = WithDouble().to(device), torch.ones(1, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    try:
        engine.backward(engine(inputs).sum())
    except AssertionError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    engine.step()
    assert model.wide.item() == -2.0, model.wide.item()
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
