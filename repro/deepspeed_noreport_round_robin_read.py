"""With round_robin_gradients, DeepSpeed returns another parameter's gradient and weight.

id: round-robin-read
engine: deepspeed
symptom: safe_get_full_grad and safe_get_full_fp32_param return a tensor of another parameter
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 2
law: access.read_param
signature: another parameter's weight
ok: repro: with round_robin_gradients safe_get_full_fp32_param returns the parameter that was named OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_round_robin_read.py

round_robin_gradients reorders the parameters of a group over the ranks. But the addresses by which the functions find a
parameter's elements in the flat partition follow the order from before.

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
from deepspeed.utils import safe_get_full_fp32_param

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "another parameter's weight"
OK = "repro: with round_robin_gradients safe_get_full_fp32_param returns the parameter that was named OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 1, "round_robin_gradients": True},
}


def main():
    deepspeed.init_distributed()
    model = nn.ParameterList([nn.Parameter(torch.full((2,), 1.0 + index)) for index in range(4)])
    model.forward = lambda x: x * sum(parameter.sum() for parameter in model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    found = [safe_get_full_fp32_param(parameter).tolist() for parameter in engine.module.parameters()]
    wanted = [[1.0 + index] * 2 for index in range(4)]
    if found != wanted and sorted(found) == wanted:
        print(f"repro: REPRODUCED: {SIGNATURE}: got {found}, expected {wanted}\n", end="", flush=True)
        return 1
    assert found == wanted, found
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
