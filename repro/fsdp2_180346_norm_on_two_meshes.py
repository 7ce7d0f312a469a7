"""clip_grad_norm_ raises if tensor parallelism splits some parameters of an FSDP2 model and not others.

id: 180346
engine: fsdp2
symptom: with FSDP2 and TP, clip_grad_norm_ raises "must have the same mesh" if the plan leaves out a parameter
reported: https://github.com/pytorch/pytorch/issues/180346
affects: ==2.13.0
fixed: not yet
ranks: 2
law: mesh.norm
signature: must have the same mesh
ok: repro: the norm of gradients on two meshes OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp2_180346_norm_on_two_meshes.py

A parameter that the plan splits has a gradient on the mesh of dp and tp. Any other parameter, such as the weight of a
norm, has a gradient on the mesh of dp alone. clip_grad_norm_ stacks the norms of both, and DTensor raises.

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
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

SIGNATURE = "must have the same mesh"
OK = "repro: the norm of gradients on two meshes OK."


def main() -> int:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4))
    plain_params = [param.detach().clone() for param in model.parameters()]
    parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
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
