"""At ZeRO stages 1 and 2, deepspeed.initialize raises for a weight without elements.

id: empty-weight-sharded
engine: deepspeed
symptom: deepspeed.initialize raises AssertionError for a model with an empty weight; PyTorch trains the model
reported: no report known
affects: ==0.19.5
fixed: 0.19.8
broken: 0.19.5
ranks: 1
law: parameters.every_kind
signature: should be < fragment_end
ok: repro: a model with an empty weight trains at ZeRO stages 1 and 2 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_empty_weight_sharded.py

DeepSpeed maps each weight to its part of the flat fp32 weights, and asserts that this part is not empty
(`get_hp_fragment_mapping`, `utils/tensor_fragment.py`).

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

SIGNATURE = "should be < fragment_end"
OK = "repro: a model with an empty weight trains at ZeRO stages 1 and 2 OK."


class WithEmpty(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.empty, self.last = nn.Linear(2, 2), nn.Linear(2, 0, bias=False), nn.Linear(2, 2)

    def forward(self, x):
        return self.last(self.first(x)) + self.empty(x).sum()


def config(stage):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    for stage in (1, 2):
        model, inputs = WithEmpty().to(device), torch.ones(1, 2).to(device)
        wanted = model.last.bias.detach() - 1
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        try:
            engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config(stage))[0]
        except AssertionError as error:
            if SIGNATURE not in str(error):
                raise
            print(f"repro: REPRODUCED: {error}, at stage {stage}\n", end="", flush=True)
            return 1
        engine.backward(engine(inputs).sum())
        engine.step()
        torch.testing.assert_close(model.last.bias.detach(), wanted)
        engine.destroy()
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
