"""A gradient_predivide_factor equal to the number of data and sequence ranks leaves gradients too small.

id: predivided-by-sequence-ranks
engine: deepspeed
symptom: if a sequence has 2 of 4 ranks, a gradient_predivide_factor of 4 halves gradients at stages 1 and 2
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 4
law: training.grads
signature: the weight moved by
ok: repro: gradient_predivide_factor leaves the sums over parts of a sequence as they are OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=4 repro/deepspeed_noreport_predivided_by_sequence_ranks.py

Ranks 0 and 1 have the parts of one sequence, ranks 2 and 3 the parts of another, so the gradient is the mean of two
sums. gradient_reduction_w_predivide divides by the factor, adds up over all 4 ranks, and multiplies by the factor times
the number of parts of a sequence over the number of ranks. It leaves out this multiplication if the factor equals the
number of ranks, as if a sequence had one part. Factors of 1 and 2 are right. The bug needs "reduce_scatter": false.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import importlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))  # DeepSpeed's CPU accelerator asks for it

import deepspeed
from deepspeed.runtime.sequence_parallel import parallel_state_sp

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

OK = "repro: gradient_predivide_factor leaves the sums over parts of a sequence as they are OK."
PARTS, RIGHT = 2, (1.0 + 10.0 + 100.0 + 1000.0) / 2


def measure_step(device, stage, factor):
    """Return how far a step with a learning rate of 1 moves a weight whose gradient is 10 ** rank on each rank."""
    model = nn.Linear(1, 1, bias=False).to(device)
    nn.init.zeros_(model.weight)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "gradient_predivide_factor": factor,
        "zero_optimization": {"stage": stage, "reduce_scatter": False, "reduce_bucket_size": 1_000},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=parallel_state_sp)[0]
    part = torch.full((1, 1), 10.0 ** dist.get_rank(), device=device)
    engine.backward(engine(part).sum())
    engine.step()
    return -model.weight.item()


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    parallel_state_sp.initialize_sequence_parallel(PARTS)
    moved = {(stage, factor): measure_step(device, stage, factor) for stage in (1, 2) for factor in (1.0, 2.0, 4.0)}
    wrong = {key: distance for key, distance in moved.items() if distance != RIGHT}
    dist.barrier()
    if dist.get_rank() == 0:
        found = [f"{distance:g} at stage {key[0]} with a factor of {key[1]:g}" for key, distance in wrong.items()]
        line = f"the weight moved by {', '.join(found)}; the mean of the sums of parts is {RIGHT:g}"
        print(f"repro: REPRODUCED: {line}\n" if wrong else f"{OK}\n", end="", flush=True)
    dist.destroy_process_group()
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
