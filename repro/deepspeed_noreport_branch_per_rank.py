"""If ranks use different layers in a step, ZeRO adds the gradient of one layer to the gradient of another.

id: branch-per-rank
engine: deepspeed
symptom: with a layer that only one rank uses, DeepSpeed sums gradients of different parameters, or the process ends
reported: no report known
affects: >=0.19.0
fixed: not yet
ranks: 2
law: parameters.used_on_some_ranks
signature: the step moves the weights by [-4.0, -4.0]
ok: repro: a layer that one rank alone uses gets the mean of the ranks' gradients at ZeRO stage 1 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_branch_per_rank.py

Each rank packs the gradients that it has into a bucket and all-reduces the bucket, without regard to what the other
ranks packed. Here rank 0 has a gradient of 2 for layer a, and rank 1 a gradient of 6 for layer b, which has the same
size. The means over the ranks are 1 and 3, but both layers get (2 + 6) / 2. With layers of different sizes gloo ends
the process (SIGABRT). Stage 0 uses zeros for a layer that a rank does not use. Routed experts are such layers. #2343
reports layers that all ranks use, but in another order. 0.16.4 to 0.18.6 do the same; 0.18.7 to 0.18.9 make no such
step on a CPU (#7948).

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

SIGNATURE = "the step moves the weights by [-4.0, -4.0]"
OK = "repro: a layer that one rank alone uses gets the mean of the ranks' gradients at ZeRO stage 1 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}


class Routed(nn.Module):
    """Pass rank 0's inputs through ``a`` and rank 1's through ``b``; all weights are 0."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        for layer in (self.a, self.b):
            nn.init.zeros_(layer.weight)

    def forward(self, x, rank):
        return 2 * self.a(x) if rank == 0 else 6 * self.b(x)


def wanted_moves(model, inputs):
    """Return the step of both layers in plain PyTorch on the mean of the ranks' losses, at the learning rate 1."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    (sum(model(inputs, rank).sum() for rank in range(2)) / 2).backward()
    optimizer.step()
    return moves(model)


def moves(model):
    values = [param.detach().unique().tolist() for param in model.parameters()]
    assert all(len(same) == 1 for same in values), values
    return [same[0] for same in values]


def main():
    deepspeed.init_distributed()
    assert torch.distributed.get_world_size() == 2, "this shows on 2 ranks"
    rank, device = torch.distributed.get_rank(), deepspeed.accelerator.get_accelerator().current_device_name()
    model, inputs = Routed().to(device), torch.ones(1, 4).to(device)
    wanted = wanted_moves(Routed().to(device), inputs)

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    engine.backward(engine(inputs, rank).sum())
    engine.step()
    told = f"the step moves the weights by {moves(model)}; in plain PyTorch by {wanted}"
    if SIGNATURE in told:
        print(f"repro: REPRODUCED: {told}\n", end="", flush=True)
        return 1
    assert moves(model) == wanted, told
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
