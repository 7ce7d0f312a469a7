"""With mesh_param, DeepSpeed does not reduce gradients over the parts of a sequence, so ranks' weights diverge.

id: sequence-parts-not-reduced
engine: deepspeed
symptom: ranks of a sequence step with the gradient of their own part, times the number of parts
reported: no report known
affects: >=0.18.0
fixed: not yet
ranks: 2
law: mesh.training
signature: on rank 0
ok: repro: gradients are summed over the parts of a sequence OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_sequence_parts_not_reduced.py

deepspeed.initialize takes the sizes of data and sequence parallelism as mesh_param=(1, 2); its JSON takes them as
data_parallel_size and sequence_parallel_size. Both ranks have a part of one sequence, so the gradient is the sum of
both ranks' gradients. In deepspeed.utils.groups, _get_sequence_data_parallel_group asks an mpu for the group of data
and sequence parallelism. Without an mpu the function returns the group of the data alone, in which each rank is by
itself. DeepSpeed divides the gradients by the size of that group over the size of sequence parallelism: one half. The
script runs the same training with an mpu, deepspeed.runtime.sequence_parallel.parallel_state_sp, where the gradient is
right.

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

OK = "repro: gradients are summed over the parts of a sequence OK."
PARTS = 2
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 0},
}


def measure_step(device, **parallelism):
    """Return how far a step with a learning rate of 1 moves a weight whose gradient is 1 on rank 0 and 10 on rank 1."""
    model = nn.Linear(1, 1, bias=False).to(device)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG, **parallelism)[0]
    part = torch.full((1, 1), 10.0 ** dist.get_rank(), device=device)
    engine.backward(engine(part).sum())
    engine.step()
    return -model.weight.item()


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    wrong = measure_step(device, mesh_param=(1, PARTS))
    deepspeed.utils.groups.mesh_device = None
    parallel_state_sp.initialize_sequence_parallel(PARTS)
    right = measure_step(device, mpu=parallel_state_sp)
    steps = [None] * PARTS
    dist.all_gather_object(steps, (wrong, right))
    is_right = all(step == (11.0, 11.0) for step in steps)
    if dist.get_rank() == 0:
        if is_right:
            print(OK, flush=True)
        else:
            (first, by_mpu), (second, _) = steps
            line = f"the weight moved by {first:g} on rank 0 and by {second:g} on rank 1; the sum of the parts is 11"
            print(f"repro: REPRODUCED: {line}, and the step with an mpu {by_mpu:g}\n", end="", flush=True)
    dist.destroy_process_group()
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
