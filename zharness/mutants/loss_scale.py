"""Mutants that apply, move, save or check the loss scale wrongly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from zharness.engines import (
    EngineConfig,
)
from zharness.engines.reference import ReferenceEngine
from zharness.mutants import seams, seams_engines
from zharness.mutants.around import Around
from zharness.mutants.mutant import (
    ALL_STAGES,
    FaultKind,
    Origin,
    Target,
    deepspeed,
    mutant,
    mutant_factory,
)
from zharness.parity import Part


@mutant(FaultKind.LOSS_SCALE, Target("training.grads", dtype="bf16"), origin=Origin.SCALE, imitates=deepspeed(7837))
class LosesBf16ByALossScale(Around):
    """Divides bf16 gradients by a loss scale of 65536 that the loss was never multiplied by."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        scaled = loss / 65536 if self.config.dtype == "bf16" else loss
        self.right.backward(scaled, retain_graph=retain_graph)


@mutant(FaultKind.LOSS_SCALE, Target("training.grads", dtype="fp16"), origin=Origin.SCALE)
class ScalesTheLossTwice(Around):
    """Multiplies the loss by the loss scale twice and divides the gradients by it once."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.right.backward(loss * self.config.loss_scale, retain_graph=retain_graph)


@mutant(
    FaultKind.LOSS_SCALE,
    Target("precision.autocast_norm", Part.OPTIMIZER, model="mixed"),
    origin=Origin.SCALE,
    imitates=deepspeed(7534),
)
class ReportsTheScaledNorm(Around):
    """Reports the gradient norm times 65536, a loss scale that bf16 does not have."""

    def grad_norm(self) -> float | None:
        norm = self.right.grad_norm()
        return None if norm is None else 65536 * norm


@mutant(
    FaultKind.LOSS_SCALE,
    Target("precision.grad_scaler", Part.OPTIMIZER, model="mixed", variant="fp16"),
    origin=Origin.PRECISION,
)
class ScalesLate(Around):
    """Doubles its loss scale one step late, and lets the first overflow pass without halving it."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        options = dict(config.options)
        if "loss_scale_window" in options.get("fp16", {}):
            late = {"loss_scale_window": options["fp16"]["loss_scale_window"] + 1, "hysteresis": 2}
            options["fp16"] = {**options["fp16"], **late}
        super().__init__(model, replace(config, options=options))


@mutant(
    FaultKind.LOSS_SCALE,
    Target("precision.grad_scaler", Part.OPTIMIZER, model="mixed", variant="autocast"),
    origin=Origin.PRECISION,
)
class StepsOverInfinities(Around):
    """Replaces infinite gradients by zeros and steps, instead of skipping the step."""

    def step(self) -> None:
        for grad in seams.reduce_pending(self.right).values():
            grad.nan_to_num_(0.0, 0.0, 0.0)
        self.right.step()


@mutant(
    FaultKind.LOSS_SCALE,
    Target("precision.grad_scaler", Part.OPTIMIZER, model="mixed", variant="resumed", parameter="loss scale"),
    origin=Origin.CIRCUMSTANCES,
)
class ForgetsTheLossScale(Around):
    """Loads everything except the loss scale and its count of steps without overflow."""

    def load(self, path: Path) -> None:
        scaler = seams.loss_scaler(self.right)
        before = scaler.state_dict()
        self.right.load(path)
        scaler.load_state_dict(before)


class _SkipAges(ReferenceEngine):
    def step(self) -> None:
        _, before = seams.step_counts(self)
        super().step()
        _, skipped = seams.step_counts(self)
        if skipped > before:
            for state in seams_engines.optimizer(self).state.values():
                if "step" in state:
                    state["step"] += 1


@mutant_factory(
    FaultKind.LOSS_SCALE,
    Target("precision.grad_scaler", Part.OPTIMIZER, model="mixed", variant="fp16", parameter="*/step"),
    over="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_1,
)
def skipped_step_ages_adam(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Counts a step that is skipped for its overflow in Adam's ``step``, and so in its bias correction.

    A skipped step should change nothing: the state is off by one, and every later update by a little.
    """
    return seams.build(model, config, _SkipAges)


class _SchedulesSkipped(ReferenceEngine):
    def step(self) -> None:
        _, before = seams.step_counts(self)
        super().step()
        _, skipped = seams.step_counts(self)
        schedule = seams_engines.schedule(self)
        if skipped > before and schedule is not None:
            schedule.step()


@mutant_factory(
    FaultKind.LOSS_SCALE,
    Target("precision.grad_scaler", Part.OPTIMIZER, model="mixed", variant="fp16", parameter="learning rate*"),
    over="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_2,
)
def schedule_moves_on_skipped_step(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Moves the learning-rate schedule on at a boundary whose step was skipped for an overflow.

    A run that begins with a few overflows loses that many steps of its warm-up.
    """
    return seams.build(model, config, _SchedulesSkipped)


@mutant_factory(
    FaultKind.RANKS,
    Target("precision.grad_scaler", Part.OPTIMIZER, model="mixed", variant="fp16"),
    over="reference",
    stages=(3,),
    origin=Origin.BLIND_2,
)
def overflow_is_decided_by_each_rank(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 3 decides on each rank, from its own shards alone, whether a step overflowed.

    Where elements of one rank overflow, that rank skips the step and the others make it: loss scales and counts of
    skipped steps differ between ranks, and the weights are half of one step and half of the next.
    """
    engine = seams.build(model, config)
    if config.stage == 3:
        seams.wrap_unscale_and_clip(engine, partial(_decide_by_own_shards, engine))
    return engine


def _decide_by_own_shards(engine: ReferenceEngine, unscale_and_clip: seams.UnscaleAndClip) -> seams.UnscaleAndClip:
    """Wrap ``unscale_and_clip`` so that finite shards of this rank suffice for a step."""

    def unscale_if_own_are_finite(reduced: Mapping[str, Tensor]) -> bool:
        if unscale_and_clip(reduced):
            return True
        if not all(bool(grad.isfinite().all()) for grad in reduced.values()):
            return False
        for grad in reduced.values():
            grad.div_(seams.loss_scaler(engine).value)
        return True

    return unscale_if_own_are_finite


class _UnscalesInPlace(ReferenceEngine):
    def full_grads(self) -> dict[str, Tensor]:
        found = super().full_grads()
        for grad in seams.reduced_grads(self).values():
            grad.div_(seams.loss_scaler(self).value)
        return found


@mutant_factory(
    FaultKind.LOSS_SCALE,
    Target("training.trajectory", Part.OPTIMIZER, variant="adamw", dtype="fp16"),
    over="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_3,
)
def looking_unscales(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """``full_grads`` divides the engine's own gradients by the loss scale, and the step divides them again.

    A caller who reads the gradients before a step trains with gradients that are too small by the loss scale.
    """
    return seams.build(model, config, _UnscalesInPlace)


@mutant_factory(
    FaultKind.LOSS_SCALE,
    Target("precision.grad_scaler", Part.OPTIMIZER, model="mixed", variant="fp16"),
    over="reference",
    stages=(3,),
    origin=Origin.BLIND_4,
)
def overflow_in_own_shard(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 3 skips a step on a rank if that rank's own shards of the gradient overflow, whatever the others have.

    The other ranks update theirs: one model has weights of two different steps, and loss scales differ between ranks.
    """
    engine = seams.build(model, config)
    if config.stage == 3 and seams.skips_on_overflow(engine):
        seams.wrap_unscale_and_clip(engine, partial(_decide_by_own_shards, engine))
    return engine


@mutant_factory(
    FaultKind.LOSS_SCALE,
    Target("precision.grad_scaler", Part.OPTIMIZER, model="mixed", variant="fp16", parameter="loss"),
    over="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_6,
)
def growth_window_survives_an_overflow(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Does not reset the count of good steps at an overflow, so the dynamic loss scale grows too early.

    The scale should grow after a window of steps without overflow, as GradScaler's does. Needs fp16's dynamic scale.
    """
    engine = seams.build(model, config)
    scaler = seams.loss_scaler(engine)
    update = scaler.update

    def update_but_the_count(overflow: bool) -> None:
        before = scaler.state_dict()["good_steps"]
        update(overflow)
        if overflow:
            scaler.load_state_dict({**scaler.state_dict(), "good_steps": before})

    seams.replace_attribute(scaler, "update", update_but_the_count)
    return engine
