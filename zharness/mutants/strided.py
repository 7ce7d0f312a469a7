"""Mutants that permute the elements of a weight that is not contiguous."""

from __future__ import annotations

import torch

from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import SpoiledLoad
from zharness.parity import Part


@mutant(
    FaultKind.STATE,
    Target("state.resume", Part.FORWARD, variant="transposed"),
    origin=Origin.BLIND_9,
)
class LoadsInTheOrderOfMemory(SpoiledLoad):
    """Loads the elements of a weight that is not contiguous in the order of its memory."""

    @torch.no_grad()
    def spoil(self) -> None:
        for parameter in self.module.parameters():
            if not parameter.is_contiguous():
                parameter.t().copy_(parameter.clone(memory_format=torch.contiguous_format).view(parameter.t().shape))
