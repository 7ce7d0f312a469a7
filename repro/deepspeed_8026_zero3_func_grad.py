"""torch.func.grad of a ZeRO-3 engine fails inside functorch, by an internal assertion or a segmentation fault.

id: 8026-grad
engine: deepspeed
symptom: INTERNAL ASSERT FAILED in ADInterpreters.cpp, or SIGSEGV, from torch.func.grad of the engine
reported: https://github.com/deepspeedai/DeepSpeed/pull/8026
affects: >=0.19.1
fixed: not yet
ranks: 1
law: torch_func.grad
signature: torch.func.grad of the engine ended inside functorch
ok: repro: torch.func.grad of the engine at ZeRO stage 3 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_8026_zero3_func_grad.py

The autograd functions of ZeRO-3's hooks run inside the transform and keep a tensor of the transform's level. Functorch
reads this tensor again after the level has ended. The memory decides which of the two failures follows, so the script
runs the transform in a process of its own. #8026 made torch.func work at stages 0 to 2 and notes that ZeRO-3 does not
work yet; #7323 is an older report. 0.18.3 to 0.18.8 raise the error of #7913.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import importlib
import os
import signal
import subprocess
import sys

import torch
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))  # DeepSpeed's CPU accelerator asks for it

import deepspeed

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

OK = "repro: torch.func.grad of the engine at ZeRO stage 3 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    # Without this threshold, every rank keeps all weights of so small a model unsharded, and nothing is freed.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def transform():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).to(device)
    x = torch.tensor([[1.0, 3.0]], device=device)
    wanted = torch.func.grad(lambda x: model(x).sum())(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    torch.testing.assert_close(torch.func.grad(lambda x: engine(x).sum())(x), wanted)
    print(OK, flush=True)


def main():
    # faulthandler prints where the process was when the signal came.
    command = [sys.executable, "-X", "faulthandler", __file__, "transform"]
    child = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    asserted = [line for line in child.stdout.splitlines() if "INTERNAL ASSERT FAILED" in line]
    if asserted and "ADInterpreters.cpp" in asserted[-1]:
        end = asserted[-1]
    elif child.returncode == -signal.SIGSEGV and "/torch/_functorch/" in child.stdout:
        end = "SIGSEGV"
    elif child.returncode == 0 and OK in child.stdout.splitlines():
        print(OK, flush=True)
        return 0
    else:
        raise AssertionError(f"ended with {child.returncode}: {child.stdout}")
    print(f"repro: REPRODUCED: torch.func.grad of the engine ended inside functorch: {end}\n", end="", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(transform() if sys.argv[1:] == ["transform"] else main())
