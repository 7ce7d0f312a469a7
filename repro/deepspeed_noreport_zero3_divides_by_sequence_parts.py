"""Stage 3 divides gradients by the number of ranks of a sequence as well; stages 0 to 2 do not.

id: zero3-divides-by-sequence-parts
engine: deepspeed
symptom: with sequence parallelism over n ranks, stage 3 trains with gradients that are n times too small
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 2
law: mesh.training
signature: at stage 3 by
ok: repro: every stage sums gradients over the parts of a sequence OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_zero3_divides_by_sequence_parts.py

Both ranks have a part of one sequence, so the gradient is the sum of both ranks' gradients. With an mpu of sequence
parallelism, stages 0 to 2 sum over data and sequence ranks, and divide by the number of data ranks. Stage 3 does so
only with "reduce_scatter": false. By default its __avg_scatter_grads calls reduce_scatter_coalesced
(deepspeed.runtime.comm.coalesced_collectives), which divides by the number of all ranks. Stage 3 does not multiply by
the number of ranks of a sequence afterwards.

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

OK = "repro: every stage sums gradients over the parts of a sequence OK."
RIGHT = 11.0


def measure_step(device, **zero):
    """Return how far a step with a learning rate of 1 moves a weight whose gradient is 1 on rank 0 and 10 on rank 1."""
    model = nn.Linear(1, 1, bias=False).to(device)
    nn.init.zeros_(model.weight)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"reduce_bucket_size": 1_000, **zero},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=parallel_state_sp)[0]
    part = torch.full((1, 1), 10.0 ** dist.get_rank(), device=device)
    engine.backward(engine(part).sum())
    engine.step()
    with deepspeed.zero.GatheredParameters([model.weight], enabled=zero["stage"] == 3):
        return -model.weight.item()


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    parallel_state_sp.initialize_sequence_parallel(dist.get_world_size())
    at_stage_2, at_stage_3 = measure_step(device, stage=2), measure_step(device, stage=3)
    without_scatter = measure_step(device, stage=3, reduce_scatter=False)
    dist.barrier()
    if dist.get_rank() == 0:
        if at_stage_3 == at_stage_2 == RIGHT:
            print(OK, flush=True)
        else:
            line = f"the weight moved at stage 2 by {at_stage_2:g}, at stage 3 by {at_stage_3:g}"
            line += f", and at stage 3 without reduce_scatter by {without_scatter:g}; the sum of the parts is {RIGHT:g}"
            print(f"repro: REPRODUCED: {line}\n", end="", flush=True)
    dist.destroy_process_group()
    sys.exit(0 if at_stage_3 == at_stage_2 == RIGHT else 1)


if __name__ == "__main__":
    main()
