"""clip_grad_norm_ raises if tensor parallelism splits some parameters of a model and not others.

id: 2420
engine: torch_tp
symptom: clip_grad_norm_ raises "got mixed torch.Tensor and DTensor" if the plan leaves out a parameter
reported: https://github.com/meta-pytorch/torchtune/issues/2420
affects: ==2.13.0
fixed: not yet
ranks: 2
law: mesh.norm
signature: got mixed torch.Tensor and DTensor
ok: repro: the norm of split and whole gradients OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/torch_tp_2420_norm_of_mixed_gradients.py

A parameter that the plan splits has a DTensor as its gradient. Any other parameter, such as the weight of a norm, has a
plain tensor as its gradient. clip_grad_norm_ gives both to one kernel.

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

SIGNATURE = "got mixed torch.Tensor and DTensor"
OK = "repro: the norm of split and whole gradients OK."


def main() -> int:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4))
    plain_params = [param.detach().clone() for param in model.parameters()]
    parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(), "2": RowwiseParallel()})
    inputs = torch.randn(3, 4)
    model(inputs).sum().backward()
    plain = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        for param, value in zip(plain.parameters(), plain_params, strict=True):
            param.copy_(value)
    plain(inputs).sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    try:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    torch.testing.assert_close(norm.full_tensor() if hasattr(norm, "full_tensor") else norm, expected)
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
