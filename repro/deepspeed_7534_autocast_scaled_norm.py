"""The gradient norm reported under torch_autocast in bf16 is 65536 times the true one at ZeRO stages 1 and 2.

id: 7534
engine: deepspeed
symptom: huge gradient norms with torch_autocast in bf16 under ZeRO-1 and ZeRO-2, while the loss goes down
reported: https://github.com/deepspeedai/DeepSpeed/pull/6993
affects: >=0.17.2,<=0.17.5
fixed: 0.17.6
broken: 0.17.5
ranks: 1
law: precision.autocast_norm
signature: the reported norm is 65536 times the true one
ok: repro: the gradient norm under torch_autocast in bf16 at ZeRO stages 1 and 2 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_7534_autocast_scaled_norm.py

DeepSpeed scales the loss for bf16 as for fp16, and computes the norm from gradients that are not unscaled yet. ZeRO-3
is right. The bug was reported in the comments on #6993 and fixed by #7534.

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

SIGNATURE = "the reported norm is 65536 times the true one"
OK = "repro: the gradient norm under torch_autocast in bf16 at ZeRO stages 1 and 2 OK."
STAGES = (1, 2)
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
}


def reported_norm(stage, inputs):
    model = nn.Linear(2, 1, bias=False).to(inputs.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.backward(engine(inputs).sum())
    engine.step()
    return float(engine.get_global_grad_norm())


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = nn.Linear(2, 1, bias=False).to(device)
    inputs = torch.tensor([[3.0, 4.0]], device=device)
    with torch.autocast(inputs.device.type, torch.bfloat16):
        loss = model(inputs).sum()
    wanted = torch.autograd.grad(loss, model.weight)[0].norm().item()

    norms = {stage: reported_norm(stage, inputs) for stage in STAGES}
    if all(norm == 65536 * wanted for norm in norms.values()):
        print(f"repro: REPRODUCED: {SIGNATURE}: by stage {norms} instead of {wanted}\n", end="", flush=True)
        return 1
    assert all(norm == wanted for norm in norms.values()), f"norms by stage {norms}, the true one is {wanted}"
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
