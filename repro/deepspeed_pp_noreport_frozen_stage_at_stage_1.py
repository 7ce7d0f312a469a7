"""At stage 1 of ZeRO, deepspeed.initialize raises for a pipeline with a frozen stage.

id: frozen-stage-at-zero-1
engine: deepspeed_pp
symptom: at stage 1 of ZeRO, deepspeed.initialize raises an IndexError if a stage of a pipeline has no weights to train
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 2
law: pipeline.frozen
signature: IndexError: list index out of range
ok: repro: a frozen stage at stage 1 of ZeRO OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_pp_noreport_frozen_stage_at_stage_1.py

The optimizer of stage 1 keeps those parameters of each group that require a gradient, and reads the dtype of the first
of them (bit16_groups[i][0] in deepspeed/runtime/zero/stage_1_and_2.py). On the ranks of a stage whose weights are all
frozen, the group of the client's optimizer has no such parameter. Ranks of other stages hang, or end with the launcher.
Without ZeRO, a pipeline whose last stage is frozen trains.

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

SIGNATURE = "IndexError: list index out of range"
OK = "repro: a frozen stage at stage 1 of ZeRO OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}


def main():
    deepspeed.init_distributed()
    layers = [nn.Linear(1, 1) for _ in range(2)]
    layers[1].requires_grad_(False)
    module = PipelineModule(
        layers, num_stages=2, loss_fn=lambda output, target: (output - target).sum(), partition_method="uniform"
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    try:
        engine = deepspeed.initialize(model=module, optimizer=optimizer, config=CONFIG)[0]
    except IndexError as error:
        if f"IndexError: {error}" != SIGNATURE:
            raise
        print(f"repro: REPRODUCED: {SIGNATURE}\n", end="", flush=True)
        os._exit(1)  # the other rank waits for this one
    engine.train_batch(iter([(torch.ones(1, 1), torch.zeros(1, 1))]))
    if dist.get_rank() == 0:
        print(OK, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.exit(0)
