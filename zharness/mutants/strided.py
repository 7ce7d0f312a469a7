"""Mutants that permute the elements of a weight that is not contiguous, or those of its gradient or state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.mutants.around import Around, SpoiledLoad
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant


def permuted(value: Tensor, like: Tensor) -> Tensor:
    """Return the elements of ``value`` as a contiguous copy has them, in the memory order of ``like``."""
    return value.t().contiguous().view(value.shape) if not like.is_contiguous() else value


@mutant(FaultKind.SHARDS, Target("parameters.every_kind", model="odd_transposed"), origin=Origin.BLIND_9)
class PermutesWeights(Around):
    """Permutes the values of a weight that is not contiguous at construction."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        for parameter in model.parameters():
            parameter.copy_(permuted(parameter.clone(), parameter))
        super().__init__(model, config)


@mutant(FaultKind.SHARDS, Target("parameters.every_kind", model="odd_transposed"), origin=Origin.BLIND_9)
class PermutesGradients(Around):
    """Permutes the gradient of a weight that is not contiguous."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for parameter in self.module.parameters():
            if parameter.requires_grad and not parameter.is_contiguous():
                parameter.register_hook(lambda grad, parameter=parameter: permuted(grad, parameter))  # type: ignore[no-untyped-call]


@mutant(FaultKind.SHARDS, Target("parameters.unfrozen", model="odd"), origin=Origin.BLIND_9)
class PermutesUpdatedWeights(Around):
    """Permutes a weight that is not contiguous after each step."""

    @torch.no_grad()
    def step(self) -> None:
        self.right.step()
        for parameter in self.module.parameters():
            parameter.copy_(permuted(parameter.clone(), parameter))


@mutant(FaultKind.SHARDS, Target("parameters.unfrozen", model="odd"), origin=Origin.BLIND_9)
class PermutesMoments(Around):
    """Permutes the optimizer state of a weight that is not contiguous after each step."""

    @torch.no_grad()
    def step(self) -> None:
        self.right.step()
        for parameter in self.optimizer.param_groups[0]["params"]:
            for value in self.optimizer.state.get(parameter, {}).values():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    value.copy_(permuted(value.clone(), parameter))


@mutant(FaultKind.STATE, Target("parameters.unfrozen", model="odd"), origin=Origin.BLIND_9)
class LoadsPermutedWeights(SpoiledLoad):
    """Permutes a weight that is not contiguous when it is loaded."""

    @torch.no_grad()
    def spoil(self) -> None:
        for parameter in self.module.parameters():
            parameter.copy_(permuted(parameter.clone(), parameter))
