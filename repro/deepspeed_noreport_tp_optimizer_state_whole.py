"""AutoTP splits parameters, but not the state that an optimizer such as Adagrad made for them when it was built.

id: tp-optimizer-state-whole
engine: deepspeed
symptom: with AutoTP, the step of Adagrad raises "The size of tensor a must match the size of tensor b"
reported: no report known
affects: ==0.19.8
fixed: not yet
ranks: 2
law: training.optimizers
signature: must match the size of tensor b
ok: repro: Adagrad with AutoTP OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_tp_optimizer_state_whole.py

Adagrad allocates its sums when it is built, with the sizes that the parameters have at that time. deepspeed.initialize
splits the parameters afterwards, in place, and leaves the optimizer's state unchanged.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import copy
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

SIGNATURE = "must match the size of tensor b"
OK = "repro: Adagrad with AutoTP OK."
SPECS = [
    {"patterns": [r"^up\.weight$"], "partition_type": "column"},
    {"patterns": [r"^down\.weight$"], "partition_type": "row"},
]
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 0},
    "tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": SPECS}},
}


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = nn.Sequential()
    model.up, model.down = nn.Linear(2, 4, bias=False), nn.Linear(4, 2, bias=False)
    model.to(device)
    for param in model.parameters():
        nn.init.ones_(param)
    plain = copy.deepcopy(model)
    x = torch.ones(1, 2, device=device)
    plain(x).sum().backward()
    torch.optim.Adagrad(plain.parameters(), lr=0.5).step()

    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.5)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    engine.backward(engine(x).sum())
    try:
        engine.step()
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    torch.testing.assert_close(model.up.weight, plain.up.weight[:2])
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
