"""At ZeRO stages 1 and 2, Muon keeps only the momentum of a rank's last matrix and loses that of all others.

id: muon-momentum-lost
engine: deepspeed
symptom: silent: with Muon at ZeRO stages 1 and 2, each step of every matrix but a rank's last begins with momentum zero
reported: no report known
affects: ==0.19.7
fixed: 0.19.8
broken: 0.19.7
ranks: 1
law: training.muon
signature: the momentum of the first matrix is lost
ok: repro: the momentum of two matrices in Muon OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_muon_momentum_lost.py

Muon writes momentum to a staging copy, which DeepSpeed keeps when the step is made. For each matrix of a partition,
_muon_staging_momentum() (runtime/zero/stage_1_and_2.py) makes the staging copy of all matrices of the partition again,
and so overwrites the momentum of the matrices before.

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

SIGNATURE = "the momentum of the first matrix is lost"
OK = "repro: the momentum of two matrices in Muon OK."

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "Muon", "params": {"lr": 1.0, "momentum": 0.5, "weight_decay": 0.0, "ns_method": "standard"}},
    "zero_optimization": {"stage": 1},
}


def main():
    deepspeed.init_distributed()
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]
    engine.backward(engine(torch.ones(1, 4, device=engine.device)).sum())
    engine.step()
    first, last = (safe_get_full_optimizer_state(layer.weight, "momentum_buffer") for layer in model)
    assert last.any(), last
    if not first.any():
        print(f"repro: REPRODUCED: {SIGNATURE}: it is zero after a step\n", end="", flush=True)
        return 1
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
