"""With drop_tokens=False, ranks with different numbers of tokens exchange expert buffers of different sizes.

id: 6809
engine: deepspeed
symptom: with drop_tokens=False and fewer tokens on one rank, ranks exchange buffers of different sizes and stall or die
reported: https://github.com/deepspeedai/DeepSpeed/issues/6809
affects: ==0.19.8
fixed: not yet
ranks: 2
law: batches.shapes
signature: exchange with experts has
ok: repro: experts with unequal numbers of tokens OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_6809_unequal_capacity.py

Every token goes to the first expert. The ranks agree on the largest number of tokens that an expert gets, which is 8.
Then each rank limits this number to its own number of tokens (deepspeed/moe/sharded_moe.py, top1gating): rank 1 has 4
tokens, so its all-to-all has other sizes. The script compares the sizes before the exchange, because gloo ends the
process in the exchange.

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
from deepspeed.moe import sharded_moe
from deepspeed.moe.layer import MoE

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

OK = "repro: experts with unequal numbers of tokens OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 0},
}
TOKENS = (8, 4)  # the number of tokens of each rank


class UnequalSizesError(Exception):
    """The ranks would exchange buffers of different sizes."""


def compare_sizes(group, buffer):
    """Replace the exchange: return the buffer if all ranks' buffers have one size, else raise UnequalSizesError."""
    sizes = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, tuple(buffer.shape))
    if len(set(sizes)) > 1:
        raise UnequalSizesError(
            f"the exchange with experts has buffers of {sizes[0]} on rank 0 and {sizes[1]} on rank 1"
        )
    return buffer


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.moe = MoE(4, nn.Linear(4, 4, bias=False), num_experts=2, ep_size=2, drop_tokens=False, use_rts=False)

    def forward(self, x):
        return self.moe(x)[0]


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = Net().to(device)
    with torch.no_grad():
        model.moe.deepspeed_moe.gate.wg.weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(2, 4))
    engine = deepspeed.initialize(model=model, model_parameters=[], config=CONFIG)[0]
    sharded_moe._AllToAll.apply = compare_sizes
    status = 0
    try:
        engine(torch.ones(TOKENS[dist.get_rank()], 4, device=device))
    except UnequalSizesError as error:
        status = 1
        if dist.get_rank() == 0:
            print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
    if status == 0 and dist.get_rank() == 0:
        print(OK, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
