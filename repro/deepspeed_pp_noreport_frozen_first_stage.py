"""A pipeline whose first stage is frozen raises in its first backward.

id: frozen-first-stage
engine: deepspeed_pp
symptom: a PipelineModule whose first stage has no weights to train raises an internal error in the first backward
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 2
law: pipeline.frozen
signature: element 0 of tensors does not require grad
ok: repro: a frozen first stage OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_pp_noreport_frozen_first_stage.py

Every stage but the last runs torch.autograd.backward on its outputs with the gradients that it received
(_exec_backward_pass of deepspeed/runtime/pipe/engine.py). If all weights of the first stage are frozen, its outputs
require no gradient, because the inputs of the model do not, and torch refuses the backward. A frozen last stage works.
With activation checkpointing by use_reentrant the inputs would require a gradient.

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

SIGNATURE = "element 0 of tensors does not require grad"
OK = "repro: a frozen first stage OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 0},
}


def main():
    deepspeed.init_distributed()
    layers = [nn.Linear(1, 1) for _ in range(2)]
    layers[0].requires_grad_(False)
    module = PipelineModule(
        layers, num_stages=2, loss_fn=lambda output, target: (output - target).sum(), partition_method="uniform"
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=module, optimizer=optimizer, config=CONFIG)[0]
    try:
        engine.train_batch(iter([(torch.ones(1, 1), torch.zeros(1, 1))]))
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {SIGNATURE}\n", end="", flush=True)
        os._exit(1)  # the other rank waits for this one
    if dist.get_rank() == 0:
        print(OK, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.exit(0)
