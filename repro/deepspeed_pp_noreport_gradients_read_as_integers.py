"""A pipeline stage between two others reads the bits of its outputs' gradients as integers.

id: gradients-read-as-integers
engine: deepspeed_pp
symptom: a stage of a PipelineModule silently reads gradients as integers if its inputs begin with integers
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 3
law: pipeline.training
signature: the gradient is that of other numbers
ok: repro: the gradients of a pipeline that passes a mask on OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=3 repro/deepspeed_pp_noreport_gradients_read_as_integers.py

Stages pass on a tuple: an int32 mask, and the activations, which have as many elements. A stage between two others
receives both. For each of them the engine keeps a buffer by its position in the tuple (_allocate_or_extend_buffers in
runtime/pipe/engine.py). For gradients the engine asks for buffers again, only for floating-point tensors: the gradient
of the activations comes first and gets the buffer of the mask, which is large enough. The engine does not check the
dtype, so it reads the bits of 1.0 as 1065353216. With the mask after the activations the gradients are right.

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
from deepspeed.pipe import PipelineModule

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "the gradient is that of other numbers"
OK = "repro: the gradients of a pipeline that passes a mask on OK."
SAMPLES = 2
CONFIG = {
    "train_micro_batch_size_per_gpu": SAMPLES,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 0},
}


class Stage(nn.Module):
    """A weight of one element; the last stage returns only the activations."""

    def __init__(self, is_last: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.is_last = is_last

    def forward(self, values: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> object:
        first = (torch.ones_like(values, dtype=torch.int32), values) if isinstance(values, torch.Tensor) else values
        mask, hidden = first
        hidden = hidden * self.weight * mask
        return hidden if self.is_last else (mask, hidden)


def main() -> int:
    deepspeed.init_distributed()
    stages = [Stage(), Stage(), Stage(is_last=True)]
    module = PipelineModule(
        stages, num_stages=3, loss_fn=lambda output, target: (output - target).sum(), partition_method="uniform"
    )
    rank, grads = dist.get_rank(), []
    stages[rank].weight.register_hook(grads.append)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=module, optimizer=optimizer, config=CONFIG)[0]
    engine.train_batch(iter([(torch.ones(SAMPLES, 1), torch.zeros(SAMPLES, 1))]))
    grad = float(grads[0])
    wrong = torch.tensor(float(grad != SAMPLES))
    dist.all_reduce(wrong)
    dist.destroy_process_group()
    if grad != SAMPLES:
        print(f"repro: REPRODUCED: {SIGNATURE}: {grad:.0f} on rank {rank}, not {SAMPLES}\n", end="", flush=True)
        return 1
    if rank == 0 and not wrong:
        print(OK, flush=True)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
