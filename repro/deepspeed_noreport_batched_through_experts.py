"""autograd.grad with a batch of gradients raises for a layer of experts that are split over ranks.

id: batched-through-experts
engine: deepspeed
symptom: with experts on two ranks, autograd.grad(is_grads_batched=True) raises "Batching rule not implemented"
reported: no report known
affects: ==0.19.8
fixed: not yet
ranks: 2
law: backward.autograd_grad
signature: Batching rule not implemented for c10d::alltoall_base_
ok: repro: a batch of gradients through experts OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_batched_through_experts.py

A batch of gradients runs the backward under vmap, and torch has no rule for the all-to-all of the tokens' gradients.
DeepSpeed's attention over a split sequence has the same all-to-all.

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
from deepspeed.moe.layer import MoE

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "Batching rule not implemented for c10d::alltoall_base_"
OK = "repro: a batch of gradients through experts OK."


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = MoE(4, nn.Linear(4, 4, bias=False), num_experts=2, ep_size=2, drop_tokens=False, use_rts=False)
    model.set_deepspeed_parallelism()
    model.to(device)
    x = torch.ones(4, 4, device=device, requires_grad=True)
    output = model(x)[0][0]
    status = 0
    try:
        torch.autograd.grad(output, x, torch.eye(len(output), device=device), is_grads_batched=True)
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        status = 1
        if dist.get_rank() == 0:
            print(f"repro: REPRODUCED: {' '.join(str(error).split())}\n", end="", flush=True)
    if status == 0 and dist.get_rank() == 0:
        print(OK, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
