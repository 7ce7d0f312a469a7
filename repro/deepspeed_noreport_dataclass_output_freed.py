"""At ZeRO stage 3, the backward of a model that returns a dataclass finds that its weights were freed.

id: dataclass-output-freed
engine: deepspeed
symptom: the backward of a model that returns a dataclass raises a size mismatch
reported: no report known
affects: >=0.16.4
fixed: not yet
ranks: 1
law: backward.outputs
signature: must match the size of tensor b (0) at non-singleton dimension
ok: repro: an output in a dataclass at ZeRO stage 3 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_dataclass_output_freed.py

A hook on the outputs of a module gathers the parameters of the module for its backward. DeepSpeed finds outputs in
tuples, lists and dictionaries. For any other output DeepSpeed warns that its hooks "may not get triggered properly",
and continues.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import importlib
import os
import sys
from dataclasses import dataclass

import torch
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))  # DeepSpeed's CPU accelerator asks for it

import deepspeed
from deepspeed.utils import safe_get_full_grad

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "must match the size of tensor b (0) at non-singleton dimension"
OK = "repro: an output in a dataclass at ZeRO stage 3 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    # Without this threshold, every rank keeps all weights of so small a model unsharded, and nothing is freed.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


@dataclass
class Output:
    logits: torch.Tensor


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(3))  # the model's own, so no hook of an inner module gathers it

    def forward(self, x):
        return Output(self.layer(x) * self.scale)


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = Model().to(device)
    params = list(model.parameters())
    nn.init.ones_(model.layer.weight)
    x = torch.tensor([[1.0, 3.0]], device=device)
    wanted = torch.autograd.grad(model(x).logits.sum(), params)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    try:
        engine.backward(engine(x).logits.sum())
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    torch.testing.assert_close([safe_get_full_grad(param) for param in params], list(wanted))
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
