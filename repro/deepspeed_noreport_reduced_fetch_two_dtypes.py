"""With stage3_use_all_reduce_for_fetch_params, DeepSpeed cannot fetch a module with weights of two dtypes (LoRA).

id: reduced-fetch-two-dtypes
engine: deepspeed
symptom: a forward with bf16 and fp32 weights and stage3_use_all_reduce_for_fetch_params raises RuntimeError
reported: no report known
affects: >=0.16.4
fixed: not yet
broken: 0.19.8
ranks: 2
law: precision.weights_of_two_dtypes
signature: expected there to be only one unique element
ok: repro: a frozen bf16 and a trained fp32 weight fetched by all-reduce OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_reduced_fetch_two_dtypes.py

If _all_gather_coalesced (runtime/zero/partition_parameters.py) gathers weights, it sorts them by dtype. If it
all-reduces them instead, it copies all of them into one buffer, and get_only_unique_item requires that they have one
dtype.

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

SIGNATURE = "expected there to be only one unique element"
OK = "repro: a frozen bf16 and a trained fp32 weight fetched by all-reduce OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
    # Without this threshold, every rank keeps all weights of so small a model unsharded.
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_use_all_reduce_for_fetch_params": True,
    },
}


class TwoDtypeModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(4, dtype=torch.bfloat16), requires_grad=False)
        self.trained = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.trained + self.frozen.float()


def main():
    deepspeed.init_distributed()
    model = TwoDtypeModel()
    optimizer = torch.optim.SGD([model.trained], lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    try:
        output = engine(torch.ones(4, device=engine.device)).tolist()
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    assert output == [2.0] * 4, output
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
