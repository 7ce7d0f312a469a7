"""torch.func transforms of a ZeRO-3 engine raise, because the autograd functions of its hooks have no vmap rule.

id: 8026-vmap
engine: deepspeed
symptom: torch.func.vmap of the engine raises "You tried to vmap over PostBackwardFunctionModule"
reported: https://github.com/deepspeedai/DeepSpeed/pull/8026
affects: >=0.19.1
fixed: not yet
ranks: 1
law: torch_func.vmap_grad
signature: You tried to vmap over PostBackwardFunctionModule
ok: repro: torch.func.vmap of torch.func.grad of the engine at ZeRO stage 3 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_8026_zero3_vmap_grad.py

#8026 made torch.func work at stages 0 to 2 and notes that ZeRO-3 does not work yet; #7323 is an older report. 0.18.3 to
0.18.8 raise the error of #7913.

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

SIGNATURE = "You tried to vmap over PostBackwardFunctionModule"
OK = "repro: torch.func.vmap of torch.func.grad of the engine at ZeRO stage 3 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    # Without this threshold, every rank keeps all weights of so small a model unsharded, and nothing is freed.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def gradients(model, batch):
    """Return the gradient of the model's output with respect to each sample."""
    return torch.func.vmap(torch.func.grad(lambda x: model(x).sum()))(batch)


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = nn.Linear(2, 1, bias=False).to(device)
    batch = torch.tensor([[1.0, 3.0], [2.0, 5.0]], device=device)
    wanted = gradients(model, batch)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    try:
        got = gradients(engine, batch)
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    torch.testing.assert_close(got, wanted)
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
