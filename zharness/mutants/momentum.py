"""Mutants whose momentum or weight decay is wrong for weights that are idle, frozen, or have gradients of zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zharness.engines import AccumulationOwner, EngineConfig
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import EngineWrapper, FSDP2Wrapper
from zharness.parity import Part


def momentum_target(law: str, variant: str = "") -> Target:
    """Return the target in a law whose model is ``experts``."""
    return Target(law, Part.OPTIMIZER, model="experts", variant=variant)


@mutant(
    FaultKind.OPTIMIZER,
    momentum_target("idle.frozen_momentum", "after_a_step"),
    momentum_target("idle.frozen_momentum", "after_a_step_2_by_engine"),
    origin=Origin.BLIND_7,
)
class StepsFrozenWeightsByMomentum(EngineWrapper):
    """Gives a weight that was frozen after construction a gradient of zero in every step, so that momentum moves it."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.built_trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def step(self) -> None:
        frozen = [parameter for parameter in self.built_trained if not parameter.requires_grad]
        for parameter in frozen:
            parameter.grad = torch.zeros_like(parameter)
        self.base.step()
        for parameter in frozen:
            parameter.grad = None


@mutant(
    FaultKind.OPTIMIZER,
    momentum_target("idle.frozen_momentum", "after_a_step"),
    origin=Origin.BLIND_7,
)
class FreezingForgetsMomentum(FSDP2Wrapper):
    """Drops the optimizer state of weights that are frozen during a forward."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for parameter in self.module.parameters():
            if not parameter.requires_grad:
                self.optimizer.state.pop(parameter, None)
        return self.base(*args, **kwargs)


@mutant(
    FaultKind.OPTIMIZER,
    momentum_target("values.zero_loss_momentum", "all_ranks"),
    momentum_target("values.zero_loss_momentum", "all_ranks_2_by_caller"),
    origin=Origin.BLIND_7,
)
class SkipsStepsOfZeros(EngineWrapper):
    """Makes no step if every gradient is zero."""

    def step(self) -> None:
        if any(bool(parameter.grad.any()) for parameter in self.parameters_with_grad() if parameter.grad is not None):
            self.base.step()


@mutant(FaultKind.STALE, momentum_target("idle.momentum", "after_zero_loss"), origin=Origin.BLIND_7)
class LeavesGradientsOfZero(FSDP2Wrapper):
    """Keeps gradients that are already zero in ``zero_grad``, instead of dropping them."""

    def zero_grad(self) -> None:
        zeros = [name for name, grad in self.base.full_grads().items() if not grad.any()]
        self.base.zero_grad()
        for name in zeros:
            parameter = self.module.get_parameter(name)
            parameter.grad = torch.zeros_like(parameter)


@mutant(
    FaultKind.STALE,
    momentum_target("idle.momentum", "2_by_engine"),
    momentum_target("idle.momentum", "after_zero_loss_2_by_engine"),
    origin=Origin.BLIND_7,
)
class BeginsWindowsWithZeros(EngineWrapper):
    """Begins an accumulation window of the engine with gradients of zero instead of none."""

    micro = 0

    def step(self) -> None:
        self.micro += 1
        is_boundary = self.micro % self.config.accumulation_steps == 0
        used = list(self.parameters_with_grad())
        self.base.step()
        if is_boundary and self.config.accumulation_owner is AccumulationOwner.ENGINE:
            for parameter in used:
                parameter.grad = torch.zeros_like(parameter)


@mutant(
    FaultKind.OPTIMIZER,
    momentum_target("values.zero_loss_momentum", "all_ranks"),
    momentum_target("idle.momentum", "after_zero_loss"),
    origin=Origin.BLIND_7,
)
class TakesZeroForUnused(EngineWrapper):
    """Treats a weight as unused in a step if the weight's gradient is zero."""

    def step(self) -> None:
        for parameter in self.parameters_with_grad():
            if parameter.grad is not None and not parameter.grad.any():
                parameter.grad = None
        self.base.step()


@mutant(FaultKind.OPTIMIZER, momentum_target("idle.momentum", "zeroed_in_place"), origin=Origin.ORDERS)
class KeepsGradientsOfZeros(EngineWrapper):
    """Keeps gradients in ``zero_grad`` that the caller has set to zero in place."""

    def zero_grad(self) -> None:
        zeros = {p: p.grad for p in self.parameters_with_grad() if p.grad is not None and not p.grad.any()}
        self.base.zero_grad()
        for parameter, grad in zeros.items():
            parameter.grad = grad
