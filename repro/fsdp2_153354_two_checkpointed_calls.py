"""FSDP2 raises if one layer is in two checkpoints, because the recomputation finds shards instead of weights.

id: 153354
engine: fsdp2
symptom: a layer in two checkpoints of one loss raises "got mixed torch.Tensor and DTensor" in the recomputation
reported: https://github.com/pytorch/pytorch/issues/153354
affects: ==2.8.0
fixed: 2.13.0
broken: 2.8.0
ranks: 1
law: checkpointing.two_regions
signature: got mixed torch.Tensor and DTensor
ok: repro: a layer in two checkpoints OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/fsdp2_153354_two_checkpointed_calls.py

The backward of the second call has already resharded the layer's weights when checkpointing recomputes the first call,
and within a backward FSDP2 does not gather weights for a forward. Reentrant checkpoints fail in the same way on 2.8,
and give a wrong gradient on 2.13 (reentrant-two-regions).

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

SIGNATURE = "got mixed torch.Tensor and DTensor"
OK = "repro: a layer in two checkpoints OK."


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.layer = nn.Linear(2, 2, bias=False)
        for layer in (self.first, self.layer):
            nn.init.constant_(layer.weight, 2.0)

    def region(self, hidden):
        return torch.relu(self.layer(hidden))

    def forward(self, x):
        once = checkpoint(self.region, self.first(x), use_reentrant=False)
        return checkpoint(self.region, once, use_reentrant=False)


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def main():
    rank = start()
    model = Twice()
    inputs = [torch.full((1, 2), each + 1.0) for each in range(dist.get_world_size())]
    for x in inputs:
        model(x).sum().backward()
    wanted = model.layer.weight.grad / len(inputs)
    model.zero_grad()

    for layer in (model.first, model.layer):
        fully_shard(layer)
    fully_shard(model)
    try:
        model(inputs[rank]).sum().backward()
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    torch.testing.assert_close(model.layer.weight.grad.full_tensor(), wanted)
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
