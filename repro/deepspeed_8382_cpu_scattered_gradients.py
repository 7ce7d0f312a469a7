"""On a CPU, ZeRO 1 and 2 without contiguous gradients reduce nothing: each rank steps with its own gradient.

id: 8382
engine: deepspeed
symptom: with "contiguous_gradients": false, training on a CPU at ZeRO stages 1 and 2 silently ignores the other ranks
reported: https://github.com/deepspeedai/DeepSpeed/pull/8382
affects: >=0.16.4,<=0.19.7
fixed: 0.19.8
broken: 0.19.5
ranks: 2
law: training.config_invariance
signature: the step used the gradient of one rank alone
ok: repro: gradients that are not contiguous are averaged over two ranks at ZeRO stages 1 and 2 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_8382_cpu_scattered_gradients.py

DeepSpeed sorts such gradients by type for the all-reduce, under names like torch.cpu.FloatTensor. The type of a tensor
on the CPU is torch.FloatTensor, so no gradient has one of these names, and DeepSpeed reduces none.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import importlib
import os
import sys

import torch
from torch import nn

os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "2"))  # DeepSpeed's CPU accelerator asks for it

import deepspeed

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "the step used the gradient of one rank alone"
OK = "repro: gradients that are not contiguous are averaged over two ranks at ZeRO stages 1 and 2 OK."


def config(stage):
    """Return DeepSpeed's configuration for the stage."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "contiguous_gradients": False},
    }


def main():
    deepspeed.init_distributed(dist_backend="gloo")
    rank = torch.distributed.get_rank()
    inputs = [torch.full((1, 4), value) for value in (2.0, 6.0)]  # one for each rank; the gradient is the input
    for stage in (1, 2):
        model = nn.Linear(4, 1, bias=False)  # each rank owns half: 0.18.0 raises on a rank that owns nothing
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config(stage))[0]
        engine.backward(engine(inputs[rank]).sum())
        with torch.no_grad():  # otherwise 0.18.7 to 0.18.9 refuse to write their flat weights (#7948)
            engine.step()
        used = -model.weight[0, 0].item()  # SGD with lr 1 has subtracted the gradient from zero
        if used in (2.0, 6.0):
            print(f"repro: REPRODUCED: {SIGNATURE}: {used} instead of 4.0 at stage {stage}\n", end="", flush=True)
            return 1
        assert used == 4.0, f"the step at stage {stage} used {used}"
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
