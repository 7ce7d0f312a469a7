"""With AutoTP without ZeRO, each rank has its own loss scale under torch_autocast in fp16.

id: tp-loss-scale-per-rank
engine: deepspeed
symptom: silent: with AutoTP at stage 0, only the rank whose part of a weight overflowed skips the step
reported: no report known
affects: >=0.18.0
fixed: not yet
broken: 0.19.8
ranks: 2
law: mesh.loss_scale
signature: the loss scales of the ranks are
ok: repro: the loss scale of all ranks OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_tp_loss_scale_per_rank.py

DeepSpeed makes a torch.amp.GradScaler on each rank (`torch_autocast_z0_gradscaler`, `runtime/engine.py`), which looks
for an overflow in the gradients of its own rank. Here the gradient of the second rank's half of a weight overflows. The
second rank skips the step and halves its loss scale, and the first rank makes the step. From then on the parts of the
weights come from different steps.

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

SIGNATURE = "the loss scales of the ranks are"
OK = "repro: the loss scale of all ranks OK."
SPECS = [{"patterns": [r"^layer\.weight$"], "partition_type": "column"}]
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    "torch_autocast": {"enabled": True, "dtype": "fp16"},
    "tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": SPECS}},
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.layer(x)


def main():
    deepspeed.init_distributed()
    model, rank = Model(), torch.distributed.get_rank()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]
    output = engine(torch.eye(4, device=engine.device))
    own = output if output.shape[-1] == 2 else output[:, 2 * rank : 2 * rank + 2]
    # The loss scale is 65536, and the largest number of fp16 is 65504.
    engine.backward(own.float().sum() * (2.0 if rank else 2.0**-8))
    before = model.layer.weight.detach().clone()
    engine.step()
    states = [None, None]
    moved = not torch.equal(before, model.layer.weight)
    torch.distributed.all_gather_object(states, (engine.torch_autocast_z0_gradscaler.get_scale(), moved))
    (first, first_moved), (second, second_moved) = states
    if first != second:
        if rank == 0:
            text = f"{SIGNATURE} {first} and {second}; their weights moved: {first_moved} and {second_moved}"
            print(f"repro: REPRODUCED: {text}\n", end="", flush=True)
        return 1
    assert first_moved == second_moved, states
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
