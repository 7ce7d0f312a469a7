"""Muon at ZeRO stage 0 steps by the plain gradient, without momentum and without Newton-Schulz.

id: 8442
engine: deepspeed
symptom: silent: without ZeRO, Muon steps like SGD, so twice the gradient makes twice the step
reported: https://github.com/deepspeedai/DeepSpeed/pull/8442
affects: >=0.18.0,<=0.19.6
fixed: 0.19.7
broken: 0.19.5
ranks: 1
law: training.muon
signature: the weight moved by its gradient
ok: repro: Muon without ZeRO orthogonalizes the gradient OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_8442_muon_without_newton_schulz.py

The optimizer leaves Newton-Schulz to ZeRO, because it could not orthogonalize ZeRO's flat partitions. Without ZeRO
nothing runs Newton-Schulz.

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
torch.compiler.set_stance("force_eager")  # to compile Muon would take a minute

SIGNATURE = "the weight moved by its gradient"
OK = "repro: Muon without ZeRO orthogonalizes the gradient OK."

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "Muon", "params": {"lr": 1.0, "momentum": 0.5, "weight_decay": 0.0, "ns_method": "standard"}},
    "zero_optimization": {"stage": 0},
}


class Matrix(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2))

    def forward(self, x):
        return (self.weight * x).sum()


def main():
    deepspeed.init_distributed()
    model = Matrix()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]
    grad = torch.tensor([[64.0, 0.0], [0.0, 64.0]], device=engine.device)
    engine.backward(engine(grad))
    engine.step()
    moved = -model.weight.detach()
    if torch.equal(moved, grad):
        print(f"repro: REPRODUCED: {SIGNATURE}: {moved.tolist()}\n", end="", flush=True)
        return 1
    assert float(moved.max()) < 2, moved
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
