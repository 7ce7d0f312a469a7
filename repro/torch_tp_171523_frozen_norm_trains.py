"""SequenceParallel unfreezes the weights of a frozen norm, so they train.

id: 171523
engine: torch_tp
symptom: SequenceParallel on a frozen norm lets its weights train: the parameters that it registers have requires_grad
reported: https://github.com/pytorch/pytorch/issues/171523
affects: ==2.13.0
fixed: not yet
ranks: 2
law: mesh.clip_biases
signature: a step changed frozen weights
ok: repro: the weights of the norm are frozen OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/torch_tp_171523_frozen_norm_trains.py

SequenceParallel replaces each weight by nn.Parameter(DTensor.from_local(...)), whose default for requires_grad is True.
The issue is about distribute_module, ColwiseParallel and RowwiseParallel, which keep requires_grad since
https://github.com/pytorch/pytorch/pull/171709. That change left out SequenceParallel, and no report about it is known.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

SIGNATURE = "a step changed frozen weights"
OK = "repro: the weights of the norm are frozen OK."


def main() -> int:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = nn.ModuleDict({"norm": nn.LayerNorm(4).requires_grad_(False), "head": nn.Linear(4, 4)})
    parallelize_module(model, mesh["tp"], {"norm": SequenceParallel(use_local_output=True)})
    before = {name: param.full_tensor().clone() for name, param in model["norm"].named_parameters()}
    model["head"](model["norm"](torch.randn(1, 1, 4))).sum().backward()  # this rank's token
    torch.optim.SGD(model.parameters(), lr=1.0, foreach=False).step()
    trained = [name for name, param in model["norm"].named_parameters() if not param.full_tensor().equal(before[name])]
    if dist.get_rank() == 0:
        if trained:
            print(f"repro: REPRODUCED: {SIGNATURE}: {', '.join(trained)}\n", end="", flush=True)
        else:
            print(OK, flush=True)
    dist.barrier()  # so that no rank ends the other ranks before this line is printed
    return 1 if trained else 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
