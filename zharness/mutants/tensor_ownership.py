"""Mutants that share memory with the caller, or depend on the memory format of the caller's tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from zharness.mutants import seams
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import DDPWrapper, EngineWrapper
from zharness.parity import Part

MODEL = "similar"


@mutant(FaultKind.STALE, Target("access.read_param", Part.GATHER, model=MODEL), origin=Origin.BLIND_7)
class ReturnsTheWeightItself(DDPWrapper):
    """Returns the weight itself from ``read_param``, so that a caller who overwrites the result changes the model."""

    def read_param(self, name: str) -> Tensor:
        return self.module.get_parameter(name).detach()


@mutant(FaultKind.STALE, Target("access.write_grad", Part.REDUCTION, model=MODEL), origin=Origin.BLIND_7)
class KeepsTheCallersGradient(DDPWrapper):
    """Keeps the caller's tensor itself in ``write_grad``, so that the caller can change the gradient afterwards."""

    def write_grad(self, name: str, value: Tensor) -> None:
        self.module.get_parameter(name).grad = value


@mutant(
    FaultKind.SHARDS,
    Target("access.write_param", Part.GATHER, model=MODEL, variant="before_forward"),
    Target("access.write_grad", Part.REDUCTION, model=MODEL),
    origin=Origin.BLIND_7,
)
class WritesInTheOrderOfMemory(DDPWrapper):
    """Writes a tensor in the order of its memory, as if it were contiguous."""

    def write_param(self, name: str, value: Tensor) -> None:
        self.base.write_param(name, in_order_of_memory(value))

    def write_grad(self, name: str, value: Tensor) -> None:
        self.base.write_grad(name, in_order_of_memory(value))


def in_order_of_memory(value: Tensor) -> Tensor:
    """Return the elements of ``value`` in the order of its memory, in the shape of ``value``."""
    return value.as_strided(value.shape, torch.empty(value.shape).stride())


@mutant(FaultKind.STALE, Target("training.looked_at", Part.OPTIMIZER), origin=Origin.BLIND_10)
class ReturnsLiveStepCounts(EngineWrapper):
    """Returns the optimizer's own step counts from ``full_optimizer_state``, so that the next step changes them."""

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        state: dict[str, dict[str, Tensor]] = self.base.full_optimizer_state()
        for name, leaf in seams.leaves(self.base).items():
            if name in state and "step" in state[name]:
                state[name]["step"] = self.optimizer.state[leaf]["step"]
        return state


@mutant(FaultKind.STALE, Target("access.read_state", Part.OPTIMIZER, MODEL, "adam"), origin=Origin.BLIND_10)
class ReadsLiveState(EngineWrapper):
    """Returns the optimizer's own tensors from ``read_optimizer_state``, so that the next step changes them."""

    def read_optimizer_state(self, name: str, key: str) -> Tensor:
        state: Tensor = self.optimizer.state[seams.leaves(self.base)[name]][key]
        return state
