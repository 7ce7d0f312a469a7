"""Clipping in bf16 at stage 0 uses a norm that leaves out the experts' gradients.

id: 8613
engine: deepspeed
symptom: in bf16 at stage 0, the norm for gradient clipping leaves out the gradients of experts
reported: https://github.com/deepspeedai/DeepSpeed/pull/8613
affects: >=0.19.8
fixed: not yet
ranks: 2
law: training.clip_and_norm
signature: the norm leaves out the experts
ok: repro: the norm with experts in bf16 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_8613_unfused_norm_without_experts.py

FP16_UnfusedOptimizer trains bf16 at stage 0 with every optimizer but FusedAdam. It splits the gradients of shared
weights and of experts, and computes the norm from the shared ones alone (step in runtime/fp16/unfused_optimizer.py).
The norm is too small, so the step is too large. The report is about the same class in fp16.

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

SIGNATURE = "the norm leaves out the experts"
OK = "repro: the norm with experts in bf16 OK."
CLIP = 1.0
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": CLIP,
    "bf16": {"enabled": True},
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
    model = Net().to(device, torch.bfloat16)
    with torch.no_grad():
        model.first.weight.copy_(torch.eye(4))
        model.moe.deepspeed_moe.gate.wg.weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(2, 4))
    group = {"params": list(model.parameters()), "name": "all"}
    optimizer = torch.optim.SGD(split_params_into_different_moe_groups_for_optimizer(group), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]

    x = torch.arange(1.0, 17.0, device=device).view(4, 4)  # all positive, so the gate chooses the first expert
    engine.backward(engine(x.bfloat16()).square().mean())
    grads = {name: param.grad.detach().float() for name, param in model.named_parameters()}
    own = sum(grads[name].square().sum() for name, param in model.named_parameters() if is_moe_param(param))
    shared = sum(grads[name].square().sum() for name, param in model.named_parameters() if not is_moe_param(param))
    dist.all_reduce(own)  # of the experts of both ranks
    whole_norm, shared_norm = (own + shared).sqrt().item(), shared.sqrt().item()
    engine.step()
    norm = float(engine.get_global_grad_norm())

    dist.barrier()
    is_right = abs(norm / whole_norm - 1) < 1e-3
    if not is_right and abs(norm / shared_norm - 1) > 1e-3:
        raise RuntimeError(f"got the norm {norm}, which is neither {whole_norm} nor, without experts, {shared_norm}")
    if dist.get_rank() == 0:
        if is_right:
            print(OK, flush=True)
        else:
            line = f"{SIGNATURE}: it is {norm:.6g}, and that of all gradients {whole_norm:.6g}"
            print(f"repro: REPRODUCED: {line}\n", end="", flush=True)
    dist.destroy_process_group()
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
