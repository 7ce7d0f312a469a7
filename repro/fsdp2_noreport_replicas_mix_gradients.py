"""FSDP2 adds one parameter's gradient to another's if micro-batches before the all-reduce use different parameters.

id: replicas-mix-gradients
engine: fsdp2
symptom: with set_requires_all_reduce(False), FSDP2 silently adds the gradient of one weight to another weight
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 2
law: window.partly_used_layer
signature: gradients are
ok: repro: gradients of micro-batches that use different weights OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp2_noreport_replicas_mix_gradients.py

Gradients that wait for the all-reduce over replicas are one flat buffer per group, of the parameters that had a
gradient in that backward. The next backward adds its own buffer to this one, without a check that both have the same
parameters. If both buffers are equally long, gradients are mixed; otherwise FSDP2 raises "The size of tensor a must
match the size of tensor b". With set_requires_gradient_sync(False), which also delays the reduce-scatter, the gradients
are right.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

OK = "repro: gradients of micro-batches that use different weights OK."


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.ones(1))
        self.second = nn.Parameter(torch.ones(1))

    def forward(self, x, use_first):
        return x * (self.first if use_first else self.second)


def train(setter):
    """Return the gradients of two micro-batches; the first micro-batch uses ``first``, the second ``second``."""
    model = fully_shard(Layers(), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    for is_last in (False, True):
        getattr(model, setter)(is_last)
        x = torch.full((1,), 20.0 if is_last else 10.0)
        model(x, use_first=not is_last).sum().backward()
    grads = [model.first.grad, model.second.grad]
    return [None if grad is None else grad.full_tensor().item() for grad in grads]


def main():
    dist.init_process_group("gloo")
    wanted = [10.0, 20.0]
    delayed = train("set_requires_gradient_sync")
    assert delayed == wanted, delayed
    got = train("set_requires_all_reduce")
    if got != wanted:
        print(f"repro: REPRODUCED: gradients are {got}, expected {wanted}\n", end="", flush=True)
        return 1
    if dist.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
