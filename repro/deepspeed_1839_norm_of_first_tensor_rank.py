"""Under AutoTP in bf16 at stage 0, DeepSpeed clips by the norm of the first rank's gradients alone.

id: 1839
engine: deepspeed
symptom: with AutoTP, bf16 and stage 0, DeepSpeed clips by the norm of the first tensor-parallel rank's part
reported: https://github.com/deepspeedai/DeepSpeed/issues/1839
affects: ==0.19.8
fixed: not yet
ranks: 2
law: training.clip_and_norm
signature: the norm of the first rank's part
ok: repro: the norm of split weights in bf16 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_1839_norm_of_first_tensor_rank.py

FP16_UnfusedOptimizer trains bf16 at stage 0 with every optimizer but FusedAdam. It passes a list of gradients to
get_weight_norm, which looks for the marks of split weights. The parameters have these marks, but their gradients do
not, so each gradient is counted only on the first rank of the group. FP16_Optimizer had the same bug until
https://github.com/deepspeedai/DeepSpeed/pull/5411.

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

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "the norm of the first rank's part"
OK = "repro: the norm of split weights in bf16 OK."
SPECS = [
    {"patterns": [r"^up\.weight$"], "partition_type": "column"},
    {"patterns": [r"^down\.weight$"], "partition_type": "row"},
]
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 0},
    "tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": SPECS}},
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(2, 4, bias=False)
        self.down = nn.Linear(4, 2, bias=False)

    def forward(self, x):
        return self.down(self.up(x))


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = Model().to(device, torch.bfloat16)
    with torch.no_grad():
        model.up.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [4.0, 0.0], [0.0, 4.0]]))
        model.down.weight.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    engine.backward(engine(torch.ones(1, 2, device=device, dtype=torch.bfloat16)).sum())
    own = sum(param.grad.float().square().sum() for param in model.parameters())
    squares = [torch.zeros_like(own) for _ in range(2)]
    dist.all_gather(squares, own)  # Both weights are split, so each rank has its own elements.
    whole_norm, first_norm = torch.stack(squares).sum().sqrt().item(), squares[0].sqrt().item()
    engine.step()
    norm = float(engine.get_global_grad_norm())
    dist.barrier()
    is_right = abs(norm / whole_norm - 1) < 1e-3
    if not is_right and abs(norm / first_norm - 1) > 1e-3:
        raise RuntimeError(f"got the norm {norm}, which is neither {whole_norm} nor, of the first rank, {first_norm}")
    if dist.get_rank() == 0:
        if is_right:
            print(OK, flush=True)
        else:
            line = f"{SIGNATURE}: it is {norm:.6g}, and that of all gradients {whole_norm:.6g}"
            print(f"repro: REPRODUCED: {line}\n", end="", flush=True)
    return int(not is_right)


if __name__ == "__main__":
    status = main()
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(status)
