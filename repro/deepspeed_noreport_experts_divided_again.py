"""At stage 0, a second backward divides the gradient of an expert by the number of ranks again.

id: experts-divided-again
engine: deepspeed
symptom: at stage 0, the first of two backwards before a step counts only half in the gradient of an expert
reported: no report known
affects: ==0.19.8
fixed: not yet
ranks: 2
law: parameters.frozen_and_unfrozen
signature: of the right gradient of an expert
ok: repro: two backwards through experts OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_experts_divided_again.py

Each backward of stage 0 reduces the content of .grad. For weights that all ranks have, the second reduction is a mean
of means, which changes nothing. But an expert's gradient is divided by the number of ranks, and the second backward
divides it again.

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
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

OK = "repro: two backwards through experts OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.0,
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
    model = Net().to(device)
    with torch.no_grad():
        model.first.weight.copy_(torch.eye(4))
        model.moe.deepspeed_moe.gate.wg.weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(2, 4))
    group = {"params": list(model.parameters()), "name": "all"}
    optimizer = torch.optim.SGD(split_params_into_different_moe_groups_for_optimizer(group), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    weight = model.moe.deepspeed_moe.experts.deepspeed_experts[0].weight

    x = torch.ones(4, 4, device=device) * (1 - 2 * dist.get_rank())  # each rank's tokens go to its own expert
    engine.backward(engine(x).sum())
    once = weight.grad.detach().clone()
    engine.backward(engine(x).sum())
    ratio = (weight.grad.sum() / (2 * once.sum())).item()
    dist.barrier()
    is_right = abs(ratio - 1) < 1e-3
    if dist.get_rank() == 0 and is_right:
        print(OK, flush=True)
    elif dist.get_rank() == 0:
        line = f"two equal backwards give {ratio:.3g} of the right gradient of an expert"
        print(f"repro: REPRODUCED: {line}\n", end="", flush=True)
    dist.destroy_process_group()
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
