"""Clipping at stage 0 uses the mean of the ranks' norms, although the ranks have different experts.

id: 8475
engine: deepspeed
symptom: with experts on two ranks, DeepSpeed clips by the mean of the ranks' norms instead of the norm of all gradients
reported: https://github.com/deepspeedai/DeepSpeed/issues/8475
affects: >=0.19.8
fixed: not yet
ranks: 2
law: mesh.clip
signature: clipped by the norm
ok: repro: the norm over experts on two ranks OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_8475_norm_averaged_over_experts.py

Every token goes to the first expert, which rank 0 owns. clip_grad_norm_ of deepspeed.runtime.utils computes a norm of
the gradients on each rank and averages these norms. Rank 1 contributes a norm without the expert. So DeepSpeed clips by
too small a norm and makes too large a step.

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
from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

OK = "repro: the norm over experts on two ranks OK."
CLIP = 1.0
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": CLIP,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 0},
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.moe = MoE(4, nn.Linear(4, 4, bias=False), num_experts=2, ep_size=2, drop_tokens=False, use_rts=False)

    def forward(self, x):
        return self.moe(self.first(x))[0]


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    torch.manual_seed(0)
    model = Net().to(device)
    with torch.no_grad():
        model.first.weight.copy_(torch.eye(4))
        model.moe.deepspeed_moe.gate.wg.weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(2, 4))
    group = {"params": list(model.parameters()), "name": "all"}
    optimizer = torch.optim.SGD(split_params_into_different_moe_groups_for_optimizer(group), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]

    x = torch.arange(1.0, 17.0, device=device).view(4, 4)  # all positive, so the gate chooses the first expert
    engine.backward(engine(x).square().sum())
    grads = {name: param.grad.detach().clone() for name, param in model.named_parameters()}
    own = sum(grads[name].square().sum() for name, param in model.named_parameters() if is_moe_param(param))
    shared = sum(grads[name].square().sum() for name, param in model.named_parameters() if not is_moe_param(param))
    dist.all_reduce(own)  # of the experts of both ranks
    whole_norm = (own + shared).sqrt().item()

    before = model.first.weight.detach().clone()
    engine.step()
    factor = ((before - model.first.weight.detach()).norm() / grads["first.weight"].norm()).item()
    used_norm = CLIP / factor
    is_right = abs(used_norm / whole_norm - 1) < 1e-3
    dist.barrier()
    if not is_right:
        if dist.get_rank() == 0:
            line = f"the gradients were clipped by the norm {used_norm:.6g}, and their norm is {whole_norm:.6g}"
            print(f"repro: REPRODUCED: {line}\n", end="", flush=True)
    elif dist.get_rank() == 0:
        print(OK, flush=True)
    dist.destroy_process_group()
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
