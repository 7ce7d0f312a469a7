"""SequenceParallel forgets that the weights of a norm are frozen, so that they train.

id: 171523
engine: torch_tp
symptom: SequenceParallel on a frozen norm lets its weights train: the parameters that it registers have requires_grad
reported: pytorch/pytorch#171523
affects: ==2.13.0
fixed: not yet
ranks: 2
law: mesh.clip_biases
signature: a frozen weight has requires_grad
ok: repro: the weights of the norm are frozen OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/torch_tp_171523_frozen_norm_trains.py

SequenceParallel registers nn.Parameter(DTensor.from_local(...)) in the place of each weight, and the default of
requires_grad is True. Since the issue ColwiseParallel, RowwiseParallel and distribute_module pass requires_grad on.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither.
"""

import sys

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module

SIGNATURE = "a frozen weight has requires_grad"
OK = "repro: the weights of the norm are frozen OK."


def main() -> int:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)).requires_grad_(False)
    parallelize_module(model, mesh["tp"], {"0": SequenceParallel(), "1": ColwiseParallel()})
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    if trained:
        print(f"repro: REPRODUCED: {SIGNATURE}: {', '.join(trained)}\n", end="", flush=True)
        return 1
    if dist.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
