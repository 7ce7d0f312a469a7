"""Muon at ZeRO stage 3 raises if the model has matrices of two shapes.

id: 8628
engine: deepspeed
symptom: ZeRO-3 with Muon and matrices of two shapes: ProcessGroupGloo::allgather: invalid tensor size
reported: https://github.com/deepspeedai/DeepSpeed/pull/8628
affects: >=0.19.0,<=0.19.7
fixed: 0.19.8
broken: 0.19.5
ranks: 2
law: training.muon
signature: invalid tensor size at index
ok: repro: Muon with matrices of two shapes at stage 3 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_8628_muon_two_shapes_zero3.py

Each rank orthogonalizes one matrix of a group of as many matrices as there are ranks. Then an all-gather sends the
updates to all ranks, and an all-gather requires tensors of one shape.

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

SIGNATURE = "invalid tensor size at index"
OK = "repro: Muon with matrices of two shapes at stage 3 OK."

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "Muon", "params": {"lr": 1.0, "momentum": 0.5, "weight_decay": 0.0, "ns_method": "standard"}},
    # Without this threshold, every rank keeps all weights of so small a model unsharded.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_scatter": False},
}


def main():
    deepspeed.init_distributed()
    model = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Linear(4, 2, bias=False))
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]
    try:
        engine.backward(engine(torch.ones(1, 2, device=engine.device)).sum())
        engine.step()
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
