"""Define a mutant of FSDP2 with tensor parallelism whose norm counts the biases of row-wise layers too often."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from zharness.engines import EngineConfig
from zharness.mutants.mesh import COUNTS_EACH_RANK, MeshWrapper, on_mesh
from zharness.mutants.mutant import FaultKind, Origin, mutant
from zharness.parity import Part


@mutant(
    FaultKind.CLIPPING,
    on_mesh("mesh.clip_biases", Part.OPTIMIZER, "heads", cause=COUNTS_EACH_RANK),
    origin=Origin.MESH,
)
class NormCountsBiasesAfterSums(MeshWrapper):
    """Clips by a norm that counts the bias of a row-wise layer, which all tp ranks have, once for each rank of tp."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        self.limit = config.clip
        super().__init__(model, replace(config, clip=None))

    def step(self) -> None:
        grads = {name: param.grad for name, param in self.params() if param.grad is not None}
        if self.limit is not None:
            squares = {name: grad.full_tensor().square().sum() for name, grad in grads.items()}
            whole = [f"{name}.bias" for name, word in self.config.tp_plan.items() if word.startswith("rowwise")]
            squares |= {name: self.tensor_size * squares[name] for name in whole if name in squares}
            factor = self.limit / float(torch.stack([*squares.values()]).sum().sqrt())
            for grad in grads.values():
                grad.mul_(min(1.0, factor))
        self.base.step()

    def grad_norm(self) -> None:
        """Return no norm."""
