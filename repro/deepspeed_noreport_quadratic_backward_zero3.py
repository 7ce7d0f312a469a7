"""At ZeRO stage 3, the number of Python calls in a backward grows quadratically with the number of parameters.

id: quadratic-backward-zero3
engine: deepspeed
symptom: a backward of many small parameters is slow: twice the parameters need three times the calls or more
reported: no report known
affects: >=0.16.4,<=0.17.0
fixed: 0.18.8
broken: 0.16.4
ranks: 1
law: resources.hook_count
signature: calls for twice the parameters
ok: repro: the calls in a backward OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_quadratic_backward_zero3.py

For each gradient, elements_in_ipg_bucket adds up the sizes of all gradients that wait in the bucket.

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

SIGNATURE = "calls for twice the parameters"
OK = "repro: the calls in a backward OK."

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


class Scalars(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(count))

    def forward(self, x):
        return x.sum() * torch.cat(list(self.weights)).sum()


def count_calls(count):
    """Return the number of Python calls in the third backward of a model with ``count`` parameters."""
    model = Scalars(count)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    calls = 0

    def count_call(_frame, event, _argument):
        nonlocal calls
        calls += event == "call"

    for _ in range(3):
        loss = engine(torch.ones(1, 1, device=engine.device))
        calls = 0
        sys.setprofile(count_call)
        engine.backward(loss)
        sys.setprofile(None)
        engine.step()
    return calls


def main():
    deepspeed.init_distributed()
    some, many = count_calls(150), count_calls(300)
    if many > 3 * some:
        print(f"repro: REPRODUCED: {many / some:.1f} times the {SIGNATURE}\n", end="", flush=True)
        return 1
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
