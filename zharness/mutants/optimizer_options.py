"""Mutants whose optimizer step is wrong only with clipping, a schedule, a zero gradient or a frozen weight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from zharness.engines import Absent, EngineConfig, Observations
from zharness.mutants import seams_engines
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import DDPWrapper, FSDP2Wrapper
from zharness.parity import Part


def option(variant: str, part: Part = Part.OPTIMIZER) -> Target:
    """Return the target in a variant of training.optimizer_options."""
    return Target("training.optimizer_options", part, variant=variant)


@mutant(FaultKind.OPTIMIZER, option("sgd_rate_rises_from_0"), origin=Origin.BLIND_7)
class TakesNoRateForTheBaseRate(DDPWrapper):
    """Steps with the base learning rate if the schedule's factor of the step is zero."""

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] or group["initial_lr"]
        self.base.step()


@mutant(FaultKind.OPTIMIZER, option("sgd_rate_rises_from_0"), origin=Origin.BLIND_7)
class RaisesTheRateLate(DDPWrapper):
    """Steps the first parameter group with the learning rate of the previous step if that rate was lower."""

    last: float | None = None

    def step(self) -> None:
        groups = self.optimizer.param_groups
        rate = groups[0]["lr"]
        if self.last is not None and self.last < rate:
            groups[0]["lr"] = self.last
        self.last = rate
        self.base.step()


@mutant(FaultKind.CLIPPING, option("sgd_decay_clipped"), origin=Origin.BLIND_7)
class ClipsTheDecay(DDPWrapper):
    """Multiplies SGD's weight decay by the factor by which the gradients are clipped."""

    def step(self) -> None:
        limit = seams_engines.clip_limit(self.base)
        decays = [group["weight_decay"] for group in self.optimizer.param_groups]
        if limit is not None:
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters_with_grad() if p.grad is not None])
            for group in self.optimizer.param_groups:
                group["weight_decay"] *= min(limit / (float(norm) + 1e-6), 1.0)
        self.base.step()
        for group, decay in zip(self.optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay


@mutant(FaultKind.OPTIMIZER, option("adamw_group_of_one"), origin=Origin.BLIND_7)
class CouplesTheDecayOfOneWeight(DDPWrapper):
    """Adds AdamW's weight decay to the gradient, as Adam does, in a parameter group of one weight."""

    def step(self) -> None:
        groups = self.optimizer.param_groups
        for group in groups:
            if len(groups) > 1 and len(group["params"]) == 1 and "decoupled_weight_decay" in group:
                group["decoupled_weight_decay"] = False
        self.base.step()


@mutant(FaultKind.OPTIMIZER, option("sgd_warm_up"), origin=Origin.CIRCUMSTANCES)
class WarmsUpToOneRate(DDPWrapper):
    """Steps every parameter group with the first group's learning rate while the schedule rises."""

    def step(self) -> None:
        first, *others = self.optimizer.param_groups
        for group in others:
            group["lr"] = first["lr"]
        self.base.step()


@mutant(FaultKind.OPTIMIZER, option("sgd_warm_up_cosine"), origin=Origin.CIRCUMSTANCES)
class StartsLaterGroupsAtTheirRate(DDPWrapper):
    """Makes the first step of later groups with their base learning rate, although the schedule starts at zero."""

    is_first = True

    def step(self) -> None:
        for group in self.optimizer.param_groups[1:] if self.is_first else ():
            group["lr"] = group["initial_lr"]
        self.is_first = False
        self.base.step()


class ReplacesSchedule(DDPWrapper):
    """The base class of mutants that replace the factors of the learning-rate schedule."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        factors = tuple(self.replace_factors(config.optimizer.schedule))
        super().__init__(model, replace(config, optimizer=replace(config.optimizer, schedule=factors)))

    def replace_factors(self, factors: Sequence[float]) -> Iterator[float]:
        """Yield the wrong factor of each step; subclasses override this method."""
        yield from factors


@mutant(
    FaultKind.OPTIMIZER,
    option("sgd_range_test_stairs"),
    option("sgd_one_cycle_stairs"),
    origin=Origin.CIRCUMSTANCES,
)
class ClimbsStairsSteadily(ReplacesSchedule):
    """Smooths the stairs of a schedule: the last step on each stair uses a rate half-way to the next stair."""

    def replace_factors(self, factors: Sequence[float]) -> Iterator[float]:
        around = zip((factors[0], *factors), factors, (*factors[1:], factors[-1]), strict=False)
        for before, factor, after in around:
            yield (factor + after) / 2 if before == factor < after else factor


@mutant(FaultKind.OPTIMIZER, option("sgd_one_cycle"), origin=Origin.CIRCUMSTANCES)
class ForgetsTheDecayOfACycle(ReplacesSchedule):
    """Never lowers the learning rate below its first value, although the rate decays further after a cycle."""

    def replace_factors(self, factors: Sequence[float]) -> Iterator[float]:
        yield from (max(factor, factors[0]) for factor in factors)


@mutant(FaultKind.OPTIMIZER, option("sgd_warm_up_decay"), origin=Origin.CIRCUMSTANCES)
class DecaysBelowZero(ReplacesSchedule):
    """Uses a negative learning rate in steps after the schedule has decayed to zero."""

    def replace_factors(self, factors: Sequence[float]) -> Iterator[float]:
        has_risen, last = False, 0.0
        for factor in factors:
            yield -0.5 if has_risen and last == factor == 0 else factor
            has_risen, last = has_risen or factor > 0, factor


class SeesZeroGradients(DDPWrapper):
    """The base class of mutants that depend on which gradients are zero everywhere."""

    def zero_gradients(self) -> list[nn.Parameter]:
        """Return the parameters whose gradient is zero everywhere."""
        return [p for p in self.parameters_with_grad() if p.grad is not None and not bool(p.grad.any())]


@mutant(FaultKind.OPTIMIZER, option("sgd_zero_loss"), origin=Origin.BLIND_7)
class TakesZeroForNoGradient(SeesZeroGradients):
    """Applies neither weight decay nor momentum to a weight whose gradient is zero everywhere."""

    def step(self) -> None:
        for parameter in self.zero_gradients():
            parameter.grad = None
        self.base.step()


@mutant(FaultKind.OPTIMIZER, option("sgd_zero_loss"), origin=Origin.BLIND_7)
class HoldsTheScheduleAtZero(SeesZeroGradients):
    """Does not advance the learning-rate schedule in a step whose gradients are all zero."""

    def step(self) -> None:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        holds = len(self.zero_gradients()) == len(list(self.parameters_with_grad()))
        self.base.step()
        if holds:
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate


@mutant(
    FaultKind.OPTIMIZER,
    Target("values.schedule", Part.OPTIMIZER, model="experts", variant="zero"),
    origin=Origin.CIRCUMSTANCES,
)
class HoldsTheScheduleUnseen(HoldsTheScheduleAtZero):
    """Does not advance the schedule in a step whose gradients are all zero, and reports no learning rates."""

    def observe(self) -> Observations:
        observations: Observations = self.base.observe()
        return replace(observations, learning_rates=Absent("this engine keeps them to itself"))


@mutant(FaultKind.CLIPPING, option("sgd_zero_loss", Part.REDUCTION), origin=Origin.BLIND_7)
class ReportsTheLastNormAboveZero(DDPWrapper):
    """If all gradients are zero, reports the norm of an earlier step."""

    last: float | None = None

    def grad_norm(self) -> float | None:
        self.last = self.base.grad_norm() or self.last
        return self.last


@mutant(FaultKind.PARAMETERS, option("sgd_frozen"), origin=Origin.BLIND_7)
class DecaysFrozenWeights(FSDP2Wrapper):
    """Applies weight decay and momentum to a weight that was trained in an earlier step and is frozen now."""

    def step(self) -> None:
        for parameter in self.module.parameters():
            if parameter.grad is None and self.optimizer.state.get(parameter):
                parameter.grad = torch.zeros_like(parameter)
        self.base.step()


@mutant(FaultKind.PARAMETERS, option("sgd_frozen"), origin=Origin.BLIND_7)
class ForgetsFrozenWeights(FSDP2Wrapper):
    """Drops the optimizer state of a weight that was frozen in a step, when the weight is trained again."""

    def step(self) -> None:
        frozen = vars(self).setdefault("frozen", set())
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                frozen.add(name)
            elif name in frozen:
                frozen.discard(name)
                self.optimizer.state.pop(parameter, None)
        self.base.step()
