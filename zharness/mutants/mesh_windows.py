"""Define a mutant of FSDP2 with tensor parallelism that is wrong only in the backwards of a no_sync block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.mutants.mesh import MeshWrapper, on_mesh
from zharness.mutants.mutant import FaultKind, Origin, mutant


@mutant(FaultKind.CONTRIBUTION, on_mesh("mesh.no_sync", model="heads"), origin=Origin.MESH)
class ColumnsKeepTheirInputGradientsInNoSync(MeshWrapper):
    """In a no_sync block, gives the input of the column-wise layer ``up`` the gradient of this rank's columns alone."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        self.blocks: list[str] = []
        super().__init__(model, config)

    def spoil_modules(self) -> None:
        layers = dict(self.module.named_modules())
        if "up" in self.config.tp_plan:
            layers["up"].register_forward_pre_hook(self.watch_input)

    def watch_input(self, module: Any, inputs: tuple[Any, ...]) -> None:
        """Make backward keep this rank's part of the gradient of the layer's input if the forward is in no_sync."""
        if self.blocks and inputs[0].requires_grad:
            inputs[0].register_hook(self.keep_part)

    def keep_part(self, grad: Tensor) -> Tensor:
        """Return this rank's part of a gradient, to which each rank of tp contributes an equal part."""
        return grad / dist.get_world_size(self.tensor_group())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.blocks.append("no_sync")
        try:
            with self.base.no_sync():
                yield
        finally:
            self.blocks.pop()
