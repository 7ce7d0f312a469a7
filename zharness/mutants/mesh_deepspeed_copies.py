"""Define mutants of DeepSpeed in which ranks that have the same weight no longer agree. The mutants need DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.mesh import CONTEXT, EXPERT, TENSOR
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import EngineWrapper
from zharness.parity import Part


def on_copies(mesh: str, model: str, parameter: str, part: Part = Part.OPTIMIZER) -> Target:
    """Return a target of the law mesh.replicas on two ranks."""
    return Target("mesh.replicas", part, model, parameter=parameter, mesh=mesh)


def on_not_finite(mesh: str, model: str) -> Target:
    """Return a target of the law mesh.not_finite on two ranks, for a gradient that is infinite on one coordinate."""
    return Target("mesh.not_finite", Part.OPTIMIZER, model, "inf", mesh=mesh)


class LastRankWrapper(EngineWrapper):
    """The base class of mutants that are wrong on the last rank of ``axis``."""

    wraps = "deepspeed"
    stages: ClassVar[tuple[int, ...]] = (0, 1, 2)
    axis: ClassVar[str] = TENSOR

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        size = config.mesh.size(self.axis)
        places = config.mesh.coordinates(dist.get_rank(), dist.get_world_size())
        self.is_last = size > 1 and places[self.axis] == size - 1
        self.split = config.mesh.size(self.axis) > 1

    def copied(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return an iterator over the parameters that every rank of the axis has whole, by name."""
        for name, param in self.module.named_parameters():
            module, _, kind = name.rpartition(".")
            word = self.config.tp_plan.get(module, "") if self.axis == TENSOR else ""
            if "experts" not in name and not word.startswith("colwise") and (kind == "bias" or not word):
                yield name, param

    def step_without_the_last(self) -> None:
        """Make a step that leaves the weights of the last rank as they were."""
        before = [(param, param.detach().clone()) for _, param in self.copied()]
        self.base.step()
        with torch.no_grad():
            for param, weight in before if self.is_last else ():
                param.copy_(weight)


class KeepsItsWeights(LastRankWrapper):
    """The base class of mutants whose last rank keeps the weights from before a step."""

    def step(self) -> None:
        self.step_without_the_last()


@mutant(FaultKind.RANKS, on_copies("tp2", "exact", "last.bias"), origin=Origin.MESH)
class TheLastTensorRankKeepsItsBiases(KeepsItsWeights):
    """On the last rank of tp, does not update the biases that are added after sums over tp."""


@mutant(FaultKind.RANKS, on_copies("ep2", "routed", "*"), origin=Origin.MESH)
class TheLastExpertRankKeepsItsSharedWeights(KeepsItsWeights):
    """On the last rank of ep, does not update the weights that do not belong to experts."""

    axis = EXPERT


@mutant(FaultKind.RANKS, on_copies("cp2", "context", "*"), origin=Origin.MESH)
class TheLastSequenceRankKeepsItsWeights(KeepsItsWeights):
    """On the last rank of a sequence, does not update the weights."""

    axis = CONTEXT


@mutant(FaultKind.RANKS, on_copies("tp2", "exact", "last.bias", Part.REDUCTION), origin=Origin.MESH)
class TheLastTensorRankLosesGradientsOfBiases(LastRankWrapper):
    """On the last rank of tp, zeroes the gradients of the biases that are added after sums over tp."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for _, param in self.copied() if self.is_last else ():
            param.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]


class SkipsAlone(LastRankWrapper):
    """The base class of mutants whose last rank makes no step if a gradient of any rank is not finite."""

    def copied(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.module.named_parameters()

    def step(self) -> None:
        grads: dict[str, Tensor] = self.base.full_grads() if self.split else {}
        if all(bool(grad.isfinite().all()) for grad in grads.values()):
            self.base.step()
        else:
            self.step_without_the_last()


@mutant(FaultKind.RANKS, on_not_finite("tp2", "exact"), origin=Origin.MESH)
class TheLastTensorRankSkipsAlone(SkipsAlone):
    """If a gradient is not finite, skips the step on the last rank of tp only; the other ranks make the step."""


@mutant(FaultKind.RANKS, on_not_finite("cp2", "context"), origin=Origin.MESH)
class TheLastSequenceRankSkipsAlone(SkipsAlone):
    """If a gradient is not finite, skips the step on the last rank of a sequence only; other ranks make the step."""

    axis = CONTEXT


@mutant(FaultKind.RANKS, on_not_finite("ep2", "routed"), origin=Origin.MESH)
class TheLastExpertRankSkipsAlone(SkipsAlone):
    """If a gradient is not finite, skips the step on the last rank of ep only; the other ranks make the step."""

    axis = EXPERT
