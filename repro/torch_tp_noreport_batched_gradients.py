"""autograd.grad with a batch of gradients raises for a layer that tensor parallelism splits.

id: batched-gradients
engine: torch_tp
symptom: autograd.grad(is_grads_batched=True) raises "Cannot access data pointer of Tensor that doesn't have storage"
reported: no report known
affects: ==2.13.0
fixed: not yet
ranks: 2
law: backward.autograd_grad
signature: Cannot access data pointer of Tensor that doesn't have storage
ok: repro: a batch of gradients OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/torch_tp_noreport_batched_gradients.py

A batch of gradients runs the backward under vmap, and the tensors under vmap have no storage that a collective could
send.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

SIGNATURE = "Cannot access data pointer of Tensor that doesn't have storage"
OK = "repro: a batch of gradients OK."


def build() -> nn.Module:
    """Return the plain model."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def run(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return the Jacobian of the first sample's outputs with respect to all inputs."""
    leaf = inputs.clone().requires_grad_()
    output = model(leaf)[0]
    return torch.autograd.grad(output, leaf, torch.eye(len(output)), is_grads_batched=True)[0]


def main() -> int:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plain, split = build(), build()
    split.load_state_dict(plain.state_dict())
    parallelize_module(split, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    inputs = torch.randn(3, 4)
    expected = run(plain, inputs)
    try:
        actual = run(split, inputs)
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        message = " ".join(str(error).split())
        print(f"repro: REPRODUCED: {message}\n", end="", flush=True)
        return 1
    torch.testing.assert_close(actual, expected)
    if dist.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
