"""Fabric raises for a model that returns a frozen dataclass.

id: 499
engine: fabric_ddp
symptom: the forward of a model that returns a frozen dataclass raises "was passed to apply_to_collection"
reported: https://github.com/Lightning-AI/utilities/pull/499
affects: ==2.6.6
fixed: not yet
ranks: 2
law: backward.outputs
signature: refused a frozen dataclass
ok: repro: a frozen dataclass is returned OK.

Run it with nothing but torch and lightning-fabric installed:

    torchrun --standalone --nproc_per_node=2 repro/fabric_ddp_499_frozen_dataclass_output.py

The wrapper of a model (_FabricModule.forward) registers a hook on each tensor of an output. The function that it uses
walks containers, and writes to the fields of a copy of each dataclass. This function raises for a frozen dataclass,
although nothing has to be written. DistributedDataParallel itself returns the dataclass.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from torch import Tensor, nn

SIGNATURE = "refused a frozen dataclass"
OK = "repro: a frozen dataclass is returned OK."


@dataclass(frozen=True)
class Output:
    hidden: Tensor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, inputs: Tensor) -> Output:
        return Output(self.linear(inputs))


def main() -> int:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model = fabric.setup_module(Model())
    try:
        output = model(torch.ones(1, 1))
    except ValueError as error:
        print(f"repro: REPRODUCED: the model's wrapper {SIGNATURE}: {error}\n", end="", flush=True)
        return 1
    if dist.get_rank() == 0 and output.hidden.requires_grad:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
