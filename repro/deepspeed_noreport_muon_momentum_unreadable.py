"""At ZeRO stages 1 and 2, the momentum of Muon cannot be read if a rank has only a part of a matrix.

id: muon-momentum-unreadable
engine: deepspeed
symptom: safe_get_full_optimizer_state(param, "momentum_buffer"): not found in optimizer state fragment, with Muon
reported: no report known
affects: >=0.19.5
fixed: not yet
broken: 0.19.8
ranks: 2
law: training.muon
signature: momentum_buffer not found in optimizer state fragment
ok: repro: the momentum of Muon OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_muon_momentum_unreadable.py

The momentum of a partition has all elements of the matrices that reach into the partition. DeepSpeed links a state to
parameters only if the state has as many elements as the partition, that is, if the partition consists of whole
matrices. The same happens on one rank with parameter_alignment, which pads the partition and not the momentum.

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

SIGNATURE = "momentum_buffer not found in optimizer state fragment"
OK = "repro: the momentum of Muon OK."

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "Muon", "params": {"lr": 1.0, "momentum": 0.5, "weight_decay": 0.0, "ns_method": "standard"}},
    "zero_optimization": {"stage": 1},
}


def main():
    deepspeed.init_distributed()
    model = nn.Linear(4, 4, bias=False)
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]
    engine.backward(engine(torch.ones(1, 4, device=engine.device)).sum())
    engine.step()
    try:
        momentum = safe_get_full_optimizer_state(model.weight, "momentum_buffer")
    except ValueError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    assert torch.equal(momentum.cpu(), torch.full((4, 4), 0.5)), momentum
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
