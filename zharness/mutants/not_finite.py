"""Mutants that are wrong only in a step whose gradients are infinite or NaN, or in the step after it."""

from __future__ import annotations

from typing import ClassVar

import torch.distributed as dist

from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import ClosesOverOthers, DDPWrapper, EngineWrapper
from zharness.parity import Part


def bad_step(variant: str, part: Part = Part.OPTIMIZER) -> Target:
    """Return the target in a variant of values.not_finite."""
    return Target("values.not_finite", part, model="experts", variant=variant)


class SeesInfinity(DDPWrapper):
    """The base class of mutants that depend on whether the gradients of a step are finite."""

    def is_finite(self) -> bool:
        """Return whether every reduced gradient is finite."""
        return all(
            bool(parameter.grad.isfinite().all())
            for parameter in self.parameters_with_grad()
            if parameter.grad is not None
        )


@mutant(FaultKind.STALE, bad_step("inf"), bad_step("nan"), origin=Origin.BLIND_7)
class ReplacesInfinity(DDPWrapper):
    """Replaces gradients that are infinite or NaN by finite numbers before the step."""

    def step(self) -> None:
        for parameter in self.parameters_with_grad():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_()
        self.base.step()


@mutant(FaultKind.OPTIMIZER, bad_step("inf"), bad_step("nan"), origin=Origin.BLIND_7)
class SkipsWithoutCounting(SeesInfinity):
    """Skips a step whose gradients are not finite, but does not count the step as skipped."""

    def step(self) -> None:
        if self.is_finite():
            self.base.step()


@mutant(FaultKind.OPTIMIZER, bad_step("inf"), bad_step("nan"), origin=Origin.CIRCUMSTANCES)
class RaisesOnOneRank(SeesInfinity):
    """Raises FloatingPointError on the last rank alone; the other ranks make the step with infinite gradients."""

    def step(self) -> None:
        if dist.get_rank() == dist.get_world_size() - 1 > 0 and not self.is_finite():
            raise FloatingPointError("the gradients are not finite")
        self.base.step()


@mutant(FaultKind.OPTIMIZER, bad_step("inf"), origin=Origin.BLIND_7)
class SkipsTheNextStep(SeesInfinity):
    """Skips the step that follows a step whose gradients were not finite."""

    skip = False

    def step(self) -> None:
        skip, self.skip = self.skip, not self.is_finite()
        if not skip:
            self.base.step()


@mutant(FaultKind.CLIPPING, bad_step("inf_clipped", Part.REDUCTION), origin=Origin.BLIND_7)
class ReportsMinusOne(DDPWrapper):
    """Reports a norm of -1 for gradients that are not finite."""

    def grad_norm(self) -> float | None:
        norm: float | None = self.base.grad_norm()
        return norm if norm is None or norm < float("inf") else -1.0


@mutant(
    FaultKind.CONTRIBUTION,
    Target("engines.one_closed", Part.OPTIMIZER, model="experts", variant="after_backward"),
    origin=Origin.BLIND_7,
)
class DropsGradientsOfOthers(ClosesOverOthers):
    """Drops the gradients of every other engine of the process in ``close``."""

    alive: ClassVar[list[EngineWrapper]] = []

    def change_other(self, engine: EngineWrapper) -> None:
        engine.base.zero_grad()


@mutant(
    FaultKind.OPTIMIZER,
    Target("values.schedule", Part.OPTIMIZER, model="experts", variant="inf"),
    Target("values.schedule", Part.OPTIMIZER, model="experts", variant="nan"),
    origin=Origin.BLIND_7,
)
class HoldsTheScheduleOfBadSteps(SeesInfinity):
    """Makes a step with gradients that are not finite, but does not advance the learning rate after it."""

    def step(self) -> None:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        is_finite = self.is_finite()
        self.base.step()
        if not is_finite:
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
