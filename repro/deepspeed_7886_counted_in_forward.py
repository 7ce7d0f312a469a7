"""DeepSpeed counts gradients of a backward inside the forward (TiledFusedLogitsLoss) with the caller's backward.

id: 7886
engine: deepspeed
symptom: ZeRO counts more gradients than the backward has, so by this count the backward ends too early
reported: https://github.com/deepspeedai/DeepSpeed/pull/7886
affects: >=0.18.5,<=0.18.6
fixed: 0.18.7
broken: 0.18.6
ranks: 1
law: backward.backward_in_forward
signature: gradients of the forward's own backwards were counted too
ok: repro: gradients counted beside TiledFusedLogitsLoss at ZeRO stages 1 to 3 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_7886_counted_in_forward.py

DeepSpeed sets the counters to zero when the forward begins. TiledFusedLogitsLoss runs one backward for each of its
shards before the forward ends. No wrong gradient was observed here: a callback of autograd ends the backward, and the
count decides only in a torch without this callback. So the script reads the counter itself.

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
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "gradients of the forward's own backwards were counted too"
OK = "repro: gradients counted beside TiledFusedLogitsLoss at ZeRO stages 1 to 3 OK."
STAGES = (1, 2, 3)
SHARDS = 2
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
}


class TiledModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3, bias=False)

    def loss_of_shard(self, hidden, target):
        return nn.functional.cross_entropy(self.head(hidden), target, reduction="sum")

    def forward(self, inputs, target):
        head = [self.head.weight]
        arguments = (self.body(inputs), target, None, SHARDS, head, "sum")
        return TiledFusedLogitsLoss.apply(TiledModel.loss_of_shard, self, *arguments)


def gradients_counted(stage, inputs, target):
    """Return how many gradients the engine has counted at the end of a backward."""
    model = TiledModel().to(inputs.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.backward(engine(inputs, target))
    return engine.optimizer._hooks_fired_this_backward


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    torch.manual_seed(0)
    inputs, target = torch.randn(1, 4, 4).to(device), torch.zeros(1, 4, dtype=torch.int64, device=device)
    wanted = 2  # weight and bias of the body; the head got its gradient in the forward and is not part of the backward

    counted = {stage: gradients_counted(stage, inputs, target) for stage in STAGES}
    if all(count == wanted + SHARDS for count in counted.values()):
        print(f"repro: REPRODUCED: {SIGNATURE}: by stage {counted} instead of {wanted}\n", end="", flush=True)
        return 1
    assert all(count == wanted for count in counted.values()), f"by stage {counted} instead of {wanted}"
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
