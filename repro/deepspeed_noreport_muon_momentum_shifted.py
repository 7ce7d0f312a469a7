"""At ZeRO stages 1 and 2, DeepSpeed links Muon's momentum to matrices by size alone and reads it one element off.

id: muon-momentum-shifted
engine: deepspeed
symptom: silent: safe_get_full_optimizer_state(param, "momentum_buffer") returns elements of other positions, with Muon
reported: no report known
affects: >=0.19.8
fixed: not yet
broken: 0.19.8
ranks: 2
law: training.muon
signature: the momentum of the last matrix
ok: repro: the momentum of the last matrix OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_muon_momentum_shifted.py

The momentum of a partition has all elements of the matrices that reach into the partition. DeepSpeed links a state to
parameters if the state has as many elements as the partition. Here the matrices have 63, 48 and 16 elements, so each
rank has 64. Rank 0 has the first matrix and one element of the second. Rank 1 has the other 47 elements of the second
matrix, the third matrix and one element of padding. The momentum of rank 1 has all 64 elements of the second and third
matrix. DeepSpeed links it as if it began with the second element of the second matrix.

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
from deepspeed.utils import safe_get_full_optimizer_state

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
torch.compiler.set_stance("force_eager")  # to compile Muon would take a minute

SIGNATURE = "the momentum of the last matrix"
OK = "repro: the momentum of the last matrix OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "Muon", "params": {"lr": 1.0, "momentum": 0.5, "weight_decay": 0.0, "ns_method": "standard"}},
    "zero_optimization": {"stage": 1},
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = (nn.Parameter(torch.zeros(*shape)) for shape in ((7, 9), (6, 8), (4, 4)))

    def forward(self, gradient):
        return self.first.sum() + self.second.sum() + (self.last * gradient).sum()


def main():
    deepspeed.init_distributed()
    model = Model()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]
    gradient = torch.arange(2.0, 18.0, device=engine.device).view(4, 4)
    engine.backward(engine(gradient))
    engine.step()
    momentum, wanted = safe_get_full_optimizer_state(model.last, "momentum_buffer"), gradient / 2
    if not torch.equal(momentum, wanted):
        if torch.distributed.get_rank() == 0:
            values = f"{momentum.flatten().tolist()[:4]}, not {wanted.flatten().tolist()[:4]}"
            print(f"repro: REPRODUCED: {SIGNATURE} begins with {values}\n", end="", flush=True)
        return 1
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
