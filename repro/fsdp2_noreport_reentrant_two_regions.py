"""FSDP2 computes wrong gradients for a layer that is in two reentrant checkpoints.

id: reentrant-two-regions
engine: fsdp2
symptom: a layer with its own group, in two reentrant checkpoints of one loss, silently gets a wrong gradient
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 1
law: checkpointing.two_regions
signature: the gradient of one region alone
ok: repro: a layer in two reentrant checkpoints OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/fsdp2_noreport_reentrant_two_regions.py

The failure is silent. Between the regions' backwards the layer's FSDP state stays PRE_BACKWARD, so the second
recomputation skips the layer's hooks (FSDPState._pre_forward). The end of backward skips a group that has already
reduced once (_root_post_backward_final_callback). So the second region's gradient stays unreduced on the gathered
weights, and these weights stay gathered. Checkpoints that are not reentrant are right. 2.8.0 is right here, and raises
"got mixed torch.Tensor and DTensor" (153354) for a layer of more than one weight.

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

SIGNATURE = "the gradient of one region alone"
OK = "repro: a layer in two reentrant checkpoints OK."


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.layer.weight, 2.0)

    def forward(self, x):
        once = checkpoint(self.layer, x, use_reentrant=True)
        return checkpoint(self.layer, once, use_reentrant=True)


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
    inputs = [torch.full((1, 1), each + 1.0, requires_grad=True) for each in range(dist.get_world_size())]
    for x in inputs:
        model(x).sum().backward()
    wanted = model.layer.weight.grad / len(inputs)
    model.zero_grad()

    fully_shard(model.layer)
    fully_shard(model)
    (shard,) = model.parameters()
    model(inputs[rank]).sum().backward()
    got = shard.grad.full_tensor()
    if torch.equal(got, wanted / 2):
        print(f"repro: REPRODUCED: {SIGNATURE}: got {got.item()}, expected {wanted.item()}\n", end="", flush=True)
        return 1
    torch.testing.assert_close(got, wanted)
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
