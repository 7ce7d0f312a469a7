"""An optimizer with foreach raises if tensor parallelism splits some parameters of a model and not others.

id: foreach-of-mixed-weights
engine: torch_tp
symptom: SGD(foreach=True) raises "got mixed torch.Tensor and DTensor" if the plan leaves out a parameter
reported: no report known
affects: ==2.13.0
fixed: not yet
ranks: 2
law: training.optimizer_options
signature: got mixed torch.Tensor and DTensor
ok: repro: a foreach step of split and whole weights OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/torch_tp_noreport_foreach_of_mixed_weights.py

torch's optimizers group parameters only by device and dtype, and give DTensors and plain tensors to one kernel.

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
OK = "repro: a foreach step of split and whole weights OK."


def build() -> nn.Module:
    """Return the plain model."""
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4))


def run(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Train one step, and return the outputs after it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, foreach=True)
    model(inputs).square().sum().backward()
    optimizer.step()
    return model(inputs).detach()


def main() -> int:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plain, split = build(), build()
    split.load_state_dict(plain.state_dict())
    parallelize_module(split, mesh, {"1": ColwiseParallel(), "2": RowwiseParallel()})
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
