"""If ranks use different layers in a step, FSDP2 adds the gradient of one layer to the gradient of another.

id: layer-per-rank
engine: fsdp2
symptom: with a layer that only one rank uses, FSDP2 silently sums gradients of different parameters
reported: documented limit, https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
affects: >=2.8.0
fixed: not yet
ranks: 2
law: parameters.used_on_some_ranks
signature: the gradients are [4.0, 4.0]
ok: repro: layers that one rank alone uses get the mean of the ranks' gradients OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp2_noreport_layer_per_rank.py

Each rank packs the gradients that it has and reduces them, without regard to what the other ranks packed. Here rank 0
has a gradient of 2 for layer a, and rank 1 a gradient of 6 for layer b, which has the same size. The means over the
ranks are 1 and 3, but both layers get (2 + 6) / 2. Later releases have set_reduce_scatter_unused_params, which includes
zeros for the parameters that a rank did not use; 2.8 does not have it.

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

SIGNATURE = "the gradients are [4.0, 4.0]"
OK = "repro: layers that one rank alone uses get the mean of the ranks' gradients OK."


class Routed(nn.Module):
    """Pass rank 0's inputs through ``a``, and rank 1's through ``b``."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x, rank):
        return 2 * self.a(x) if rank == 0 else 6 * self.b(x)


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def main():
    rank = start()
    assert dist.get_world_size() == 2, "this shows on 2 ranks"
    model = Routed()
    fully_shard(model)
    # Reduce sums and divide here, because gloo's mean depends on the release (pytorch#162338).
    model.set_force_sum_reduction_for_comms(True)
    model.set_gradient_divide_factor(2.0)

    model(torch.ones(1, 4), rank).sum().backward()
    grads = [param.grad for param in model.parameters()]
    # A rank has no gradient of the layer that it did not use, and full_tensor would wait for one. So each rank reports
    # its own gradients.
    own = torch.tensor([-1.0 if grad is None else grad.to_local().max().item() for grad in grads])
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    told = f"the gradients are {own.tolist()}; the means over the ranks are [1.0, 3.0]"
    if SIGNATURE in told:
        print(f"repro: REPRODUCED: {told}\n", end="", flush=True)
        return 1
    assert own.tolist() == [1.0, 3.0], told
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
