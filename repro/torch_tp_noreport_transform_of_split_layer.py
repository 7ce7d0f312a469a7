"""torch.func transforms raise over a layer that tensor parallelism splits.

id: transform-of-split-layer
engine: torch_tp
symptom: torch.func.grad over a split module raises "must override the setup_context staticmethod"
reported: no report known
affects: ==2.13.0
fixed: not yet
ranks: 2
law: torch_func.through_transforms
signature: it must override the setup_context staticmethod
ok: repro: a transform of a split layer OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/torch_tp_noreport_transform_of_split_layer.py

DTensor.from_local and DTensor.to_local are autograd.Functions whose forward takes ctx, which transforms refuse.

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

SIGNATURE = "it must override the setup_context staticmethod"
OK = "repro: a transform of a split layer OK."


def build() -> nn.Module:
    """Return the plain model."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def run(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the sum of squares with respect to the inputs."""
    return torch.func.grad(lambda leaf: model(leaf).square().sum())(inputs)


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
