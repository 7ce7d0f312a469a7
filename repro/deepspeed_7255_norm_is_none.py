"""engine.get_global_grad_norm() returns None at stage 0 in fp32, although the step has computed the norm.

id: 7255
engine: deepspeed
symptom: get_global_grad_norm() returns None after a step with clipping at stage 0 in fp32
reported: https://github.com/deepspeedai/DeepSpeed/issues/7255
affects: >=0.16.4
fixed: not yet
ranks: 1
law: training.clip_and_norm
signature: get_global_grad_norm() is None
ok: repro: the gradient norm of a step at ZeRO stage 0 in fp32 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_7255_norm_is_none.py

clip_fp32_gradients calls clip_grad_norm_ and drops the norm that it returns.

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

OK = "repro: the gradient norm of a step at ZeRO stage 0 in fp32 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 0},
}


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = nn.Linear(2, 1, bias=False).to(device)
    x = torch.tensor([[3.0, 4.0]], device=device)  # the weight's gradient is the input, so the norm is 5
    wanted = torch.autograd.grad(model(x).sum(), model.weight)[0].norm().item()

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    engine.backward(engine(x).sum())
    engine.step()
    norm = engine.get_global_grad_norm()
    if norm is None:
        found = f"get_global_grad_norm() is None after a step with gradients of norm {wanted}"
        print(f"repro: REPRODUCED: {found}\n", end="", flush=True)
        return 1
    torch.testing.assert_close(float(norm), wanted)
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
