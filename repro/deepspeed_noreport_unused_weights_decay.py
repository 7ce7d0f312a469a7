"""AdamW decays a weight that no loss uses, because DeepSpeed gives the weight a gradient of zeros instead of None.

id: unused-weights-decay
engine: deepspeed
symptom: weight decay shrinks the weight of a layer that no loss uses
reported: no report known
affects: >=0.16.4
fixed: not yet
ranks: 1
law: parameters.stay_put
signature: the step moved a weight that has no gradient
ok: repro: an unused weight under AdamW at ZeRO stage 1 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_unused_weights_decay.py

The failure is silent, at stages 0 to 3. DeepSpeed fills a missing gradient with zeros for the flat buffer, and the
optimizer cannot distinguish a missing gradient from zeros. PyTorch's own optimizers leave a parameter without a
gradient unchanged. The law parameters.branch shows the bug too.

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

OK = "repro: an unused weight under AdamW at ZeRO stage 1 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(2, 1, bias=False)
        self.unused = nn.Linear(2, 1, bias=False)
        nn.init.ones_(self.used.weight)
        nn.init.constant_(self.unused.weight, 8.0)

    def forward(self, x):
        return self.used(x)


def adamw(model):
    """Return an optimizer that halves a weight in each step in which the weight's gradient is zeros."""
    return torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.5)


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    x = torch.tensor([[1.0, 3.0]], device=device)
    plain = Model().to(device)
    optimizer = adamw(plain)
    plain(x).sum().backward()
    optimizer.step()
    wanted = plain.unused.weight.detach()

    model = Model().to(device)
    engine = deepspeed.initialize(model=model, optimizer=adamw(model), config=CONFIG)[0]
    engine.backward(engine(x).sum())
    engine.step()
    got = model.unused.weight.detach()
    if torch.equal(got, wanted / 2):
        moved = f"the step moved a weight that has no gradient, from {wanted.tolist()} to {got.tolist()}"
        print(f"repro: REPRODUCED: {moved}\n", end="", flush=True)
        return 1
    torch.testing.assert_close(got, wanted)
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
