"""At ZeRO stages 1 and 2, each rank applies Muon to a matrix of which only the rank's own part is reduced.

id: 7807
engine: deepspeed
symptom: silent: with reduce_scatter, ranks that share a matrix update it by different, wrong matrices
reported: https://github.com/deepspeedai/DeepSpeed/issues/7807
affects: >=0.19.0,<=0.19.1
fixed: 0.19.5
broken: 0.19.1
ranks: 2
law: training.muon
signature: the weight is not that of the mean gradient
ok: repro: Muon of a matrix that two ranks share OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_7807_muon_partly_reduced.py

A rank gets the mean of its own part of a gradient, but orthogonalizes the whole matrix. The other parts hold the
gradient of this rank alone, divided by the number of ranks. The script does not run on 0.18.0, whose muon_update() has
no ns_method; on 0.18.0 the law shows the bug.

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
from deepspeed.runtime.zero.muon.original_muon import muon_update

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
torch.compiler.set_stance("force_eager")  # to compile Muon would take a minute

SIGNATURE = "the weight is not that of the mean gradient"
OK = "repro: Muon of a matrix that two ranks share OK."

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "Muon", "params": {"lr": 1.0, "momentum": 0.5, "weight_decay": 0.0, "ns_method": "standard"}},
    "zero_optimization": {"stage": 1},
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
    grads = [torch.diag(torch.tensor(diagonal, device=engine.device)) for diagonal in ([64.0, 1.0], [1.0, 64.0])]
    engine.backward(engine(grads[torch.distributed.get_rank()]))
    engine.step()
    mean = (grads[0] + grads[1]) / 2
    right = -muon_update(mean, torch.zeros_like(mean), beta=0.5, ns_method="standard")
    got = model.weight.detach()
    if not torch.equal(got, right.to(got.dtype)):
        print(f"repro: REPRODUCED: {SIGNATURE}: {got.tolist()} instead of {right.tolist()}\n", end="", flush=True)
        return 1
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
