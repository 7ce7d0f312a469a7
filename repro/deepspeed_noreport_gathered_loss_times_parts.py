"""With the loss of the Ulysses tutorial, stages 0 to 2 multiply gradients by the number of ranks of a sequence.

id: gathered-loss-times-parts
engine: deepspeed
symptom: a loss gathered over n ranks of a sequence gives n times the gradient at stages 0 to 2; stage 3 is right
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 2
law: mesh.token_loss
signature: at stages 0, 1 and 2 by
ok: repro: a loss that is gathered over a sequence has the gradient of the mean over all tokens OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_gathered_loss_times_parts.py

DeepSpeed's tutorial of Ulysses gathers the losses of all parts with torch.distributed.nn.functional.all_gather, and
weighs each loss with the tokens of its part. Every rank then calls backward on the whole loss, and the backward of that
all_gather adds up the gradients of all ranks. DeepSpeed's stages 0 to 2 sum over the parts of a sequence and divide by
the number of data ranks alone, which is right if each rank computes a loss of its own part. So the gradient is n times
too large for a sequence of n ranks. Stage 3 also divides by the ranks of a sequence (zero3-divides-by-sequence-parts),
so only stage 3 is right with this loss. DeepSpeed's own test of the tutorial (test_ulysses_sp_hf.py) compares gradients
at stage 2 with an absolute tolerance of 1e-3.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, that is, if stages
0 to 2 move the weight by exactly n times the mean, it prints a line that starts with "repro: REPRODUCED" and exits with
1. Any other end, such as another wrong step or a traceback, shows neither.
"""

import importlib
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))  # DeepSpeed's CPU accelerator asks for it

import deepspeed
from deepspeed.runtime.sequence_parallel import parallel_state_sp

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

OK = "repro: a loss that is gathered over a sequence has the gradient of the mean over all tokens OK."
TOKENS = ([1.0, 1.0, 1.0], [10.0])  # of each rank
RIGHT = sum(map(sum, TOKENS)) / sum(map(len, TOKENS))


def gather_loss(loss, tokens):
    """Return the mean over the tokens of all parts, as the tutorial computes it."""
    group = parallel_state_sp.get_sequence_parallel_group()
    losses = torch.distributed.nn.functional.all_gather(loss, group=group)
    counts = torch.distributed.nn.functional.all_gather(tokens, group=group)
    return sum(losses[rank] * counts[rank] for rank in range(len(losses))) / sum(counts)


def measure_step(device, stage):
    """Return how far a step with a learning rate of 1 moves a weight, whose gradient is the mean of all tokens."""
    model = nn.Linear(1, 1, bias=False).to(device)
    nn.init.zeros_(model.weight)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1_000},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=parallel_state_sp)[0]
    part = torch.tensor(TOKENS[dist.get_rank()], device=device).unsqueeze(1)
    engine.backward(gather_loss(engine(part).mean(), torch.tensor(float(len(part)), device=device)))
    engine.step()
    with deepspeed.zero.GatheredParameters([model.weight], enabled=stage == 3):
        return -model.weight.item()


def judge_steps(steps, parts):
    """Return the exit code: 0 for right steps, 1 for the bug (stage 3 may make any step), else 2."""
    if all(step == RIGHT for step in steps):
        return 0
    return 1 if all(step == parts * RIGHT for step in steps[:3]) else 2


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    parallel_state_sp.initialize_sequence_parallel(dist.get_world_size())
    steps = [measure_step(device, stage) for stage in range(4)]
    dist.barrier()
    line = f"the weight moved at stages 0, 1 and 2 by {steps[0]:g}, {steps[1]:g} and {steps[2]:g}"
    line += f", and at stage 3 by {steps[3]:g}; the mean of all tokens is {RIGHT:g}"
    verdict = judge_steps(steps, dist.get_world_size())
    assert verdict < 2, f"neither the mean nor its multiple: {line}"
    if dist.get_rank() == 0:
        if verdict == 1:
            print(f"repro: REPRODUCED: {line}\n", end="", flush=True)
        else:
            print(OK, flush=True)
    dist.destroy_process_group()
    sys.exit(verdict)


if __name__ == "__main__":
    main()
