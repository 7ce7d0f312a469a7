"""train_batch of a pipeline puts layers into training mode that the caller put into evaluation mode.

id: evaluated-layer-trains
engine: deepspeed_pp
symptom: train_batch silently puts a PipelineModule's layer into training mode although the caller called eval() on it
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 2
law: pipeline.buffers
signature: the layer in evaluation mode counted a batch
ok: repro: a layer in evaluation mode OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_pp_noreport_evaluated_layer_trains.py

train_batch begins with self.module.train(), which reaches every layer. A caller often freezes the statistics of a batch
norm for fine-tuning; train_batch makes this batch norm update its statistics and normalize by those of the batch. A
dropout that the caller switched off drops elements again. An eval() before the call has no effect.

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

SIGNATURE = "the layer in evaluation mode counted a batch"
OK = "repro: a layer in evaluation mode OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 0},
}


def main() -> int:
    deepspeed.init_distributed()
    layers = [nn.BatchNorm1d(1) for _ in range(2)]
    module = PipelineModule(
        layers, num_stages=2, loss_fn=lambda output, target: (output - target).sum(), partition_method="uniform"
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=module, optimizer=optimizer, config=CONFIG)[0]
    for layer in layers:
        layer.eval()
    engine.train_batch(iter([(torch.ones(2, 1), torch.zeros(2, 1))]))
    rank = dist.get_rank()
    count = int(layers[rank].num_batches_tracked)
    dist.destroy_process_group()
    if count == 1:
        print(f"repro: REPRODUCED: {SIGNATURE}, on rank {rank}\n", end="", flush=True)
        return 1
    assert count == 0, count
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
