"""Mutants that apply, update, save or check the loss scale wrongly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import (
    EngineConfig,
)
from zharness.engines.reference import ReferenceEngine
from zharness.mutants import seams, seams_engines
from zharness.mutants.mutant import (
    ALL_STAGES,
    FaultKind,
    Origin,
    Target,
    deepspeed,
    mutant,
    mutant_factory,
)
from zharness.mutants.wrapper import CountsMicroBatches, EngineWrapper
from zharness.parity import Part


@mutant(FaultKind.LOSS_SCALE, Target("training.grads", dtype="bf16"), origin=Origin.SCALE, imitates=deepspeed(7837))
class LosesBf16ByALossScale(EngineWrapper):
    """Divides bf16 gradients by a loss scale of 65536, although the loss was not multiplied by this scale."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        scaled = loss / 65536 if self.config.dtype == "bf16" else loss
        self.base.backward(scaled, retain_graph=retain_graph)


@mutant(
    FaultKind.LOSS_SCALE,
    Target("precision.grad_scaler", Part.OPTIMIZER, model="mixed", variant="2_by_engine", parameter="loss"),
    origin=Origin.BLIND_11,
)
class GrowthCountsMicroBatches(CountsMicroBatches):
    """Counts the first micro-batch of an engine's window as a step after which the loss scale may grow."""

    def step(self) -> None:
        if self.window > 1 and self.micro == 0:
            scaler = seams.loss_scaler(self.base)
            scaler.load_state_dict({**scaler.state_dict(), "good_steps": 1})
        self.count_step()
        self.base.step()


@mutant(FaultKind.LOSS_SCALE, Target("training.grads", dtype="fp16"), origin=Origin.SCALE)
class ScalesTheLossTwice(EngineWrapper):
    """Multiplies the loss by the loss scale twice and divides the gradients by it once."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(loss * self.config.loss_scale, retain_graph=retain_graph)


@mutant(
    FaultKind.LOSS_SCALE,
    Target("precision.autocast_norm", Part.OPTIMIZER, model="mixed"),
    origin=Origin.SCALE,
    imitates=deepspeed(7534),
)
class ReportsTheScaledNorm(EngineWrapper):
    """Reports the gradient norm multiplied by 65536, as if bf16 had a loss scale."""

    def grad_norm(self) -> float | None:
        norm = self.base.grad_norm()
        return None if norm is None else 65536 * norm


@mutant(
    FaultKind.LOSS_SCALE,
    Target("precision.grad_scaler", Part.REDUCTION, model="mixed", variant="clipped", parameter="norm"),
    origin=Origin.PRECISION,
)
class UnscalesTheNormByTheNextScale(EngineWrapper):
    """Divides the norm of the scaled gradients by the loss scale after the step, not by the scale before the step."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.growth = 1.0

    def step(self) -> None:
        scale = self.base.observe().loss_scale
        self.base.step()
        self.growth = self.base.observe().loss_scale / scale

    def grad_norm(self) -> float | None:
        norm = self.base.grad_norm()
        return None if norm is None else norm / self.growth


@mutant(
    FaultKind.LOSS_SCALE,
    Target("precision.grad_scaler", Part.OPTIMIZER, model="mixed", variant="fp16"),
    origin=Origin.PRECISION,
)
class ScalesLate(EngineWrapper):
    """Doubles the loss scale one step too late, and does not halve it at the first overflow."""

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
class StepsOverInfinities(EngineWrapper):
    """Replaces infinite gradients by zeros and makes the step, instead of skipping it."""

    def step(self) -> None:
        for grad in seams.reduce_pending(self.base).values():
            grad.nan_to_num_(0.0, 0.0, 0.0)
        self.base.step()


@mutant(
    FaultKind.LOSS_SCALE,
    Target("precision.grad_scaler", Part.OPTIMIZER, model="mixed", variant="resumed", parameter="loss scale"),
    origin=Origin.CIRCUMSTANCES,
)
class ForgetsTheLossScale(EngineWrapper):
    """Does not restore the loss scale, or the count of steps without overflow, from a checkpoint."""

    def load(self, path: Path) -> None:
        scaler = seams.loss_scaler(self.base)
        before = scaler.state_dict()
        self.base.load(path)
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
    Target("precision.grad_scaler", Part.OPTIMIZER, model="mixed", variant="minimum", parameter="*/step"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_1,
)
def skipped_step_ages_adam(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Increments Adam's ``step`` in a step that is skipped because of an overflow.

    A skipped step should change nothing, but the bias correction of every later update is slightly wrong.
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
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_2,
)
def schedule_moves_on_skipped_step(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Advances the learning-rate schedule at a boundary whose step is skipped because of an overflow.

    A run that begins with a few overflows loses that many steps of its warm-up.
    """
    return seams.build(model, config, _SchedulesSkipped)


@mutant_factory(
    FaultKind.RANKS,
    Target("precision.grad_scaler", Part.OPTIMIZER, model="mixed", variant="fp16"),
    wraps="reference",
    stages=(3,),
    origin=Origin.BLIND_2,
)
def overflow_is_decided_by_each_rank(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 3, decides on each rank, from that rank's shards only, whether the step overflowed.

    If only the shards of one rank overflow, that rank skips the step and the other ranks make it. Loss scales and
    counts of skipped steps then differ between ranks, and the model mixes weights from before and after the step.
    """
    engine = seams.build(model, config)
    if config.stage == 3:
        seams.wrap_unscale_and_clip(engine, partial(_decide_by_own_shards, engine))
    return engine


def _decide_by_own_shards(engine: ReferenceEngine, unscale_and_clip: seams.UnscaleAndClip) -> seams.UnscaleAndClip:
    """Wrap ``unscale_and_clip`` so that a rank makes the step if its own shards are finite."""

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
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_3,
)
def looking_unscales(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Divides the engine's own gradients by the loss scale in ``full_grads``, and divides them again in the step.

    If a caller reads the gradients before a step, the step uses gradients that are too small by the loss scale.
    """
    return seams.build(model, config, _UnscalesInPlace)


@mutant_factory(
    FaultKind.LOSS_SCALE,
    Target("precision.grad_scaler", Part.OPTIMIZER, model="mixed", variant="fp16"),
    wraps="reference",
    stages=(3,),
    origin=Origin.BLIND_4,
)
def overflow_in_own_shard(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 3, skips the step only on those ranks whose own gradient shards overflow.

    The other ranks make the step, so the model has weights of two different steps, and loss scales differ between
    ranks.
    """
    engine = seams.build(model, config)
    if config.stage == 3 and seams.skips_on_overflow(engine):
        seams.wrap_unscale_and_clip(engine, partial(_decide_by_own_shards, engine))
    return engine


@mutant_factory(
    FaultKind.LOSS_SCALE,
    Target("precision.grad_scaler", Part.OPTIMIZER, model="mixed", variant="fp16", parameter="loss"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_6,
)
def growth_window_survives_an_overflow(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Does not reset the count of steps without overflow at an overflow, so the loss scale grows too early.

    The dynamic loss scale should grow after a window of steps without overflow, as in GradScaler. Only fp16 with a
    dynamic loss scale shows the fault.
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


@mutant(
    FaultKind.LOSS_SCALE,
    Target("values.skipped_step", Part.OPTIMIZER, variant="one_element", dtype="fp16", stage=2, parameter="outcome"),
    origin=Origin.BLIND_9,
)
class OverflowSeenOnRankZero(EngineWrapper):
    """Skips a step only if the shards of rank 0 overflow, and makes the step if only another rank's shards overflow."""

    stages = (2,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)

        def wrap(unscale_and_clip: seams.UnscaleAndClip) -> seams.UnscaleAndClip:
            def decide_on_rank_0(reduced: Mapping[str, Tensor]) -> bool:
                if unscale_and_clip(reduced):
                    return True
                is_finite = torch.tensor([float(all(bool(grad.isfinite().all()) for grad in reduced.values()))])
                dist.broadcast(is_finite, 0)
                return bool(is_finite.item())

            return decide_on_rank_0

        seams.wrap_unscale_and_clip(self.base, wrap)


@mutant(
    FaultKind.LOSS_SCALE,
    Target("training.small_gradients", model="exact", dtype="fp16"),
    origin=Origin.BLIND_9,
)
class UnscalesInHalf(EngineWrapper):
    """Rounds unscaled gradients to fp16, so that small gradients are lost."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)

        def wrap(unscale_and_clip: seams.UnscaleAndClip) -> seams.UnscaleAndClip:
            def unscale_in_half(reduced: Mapping[str, Tensor]) -> bool:
                is_finite = unscale_and_clip(reduced)
                for grad in reduced.values():
                    grad.copy_(grad.half())
                return is_finite

            return unscale_in_half

        seams.wrap_unscale_and_clip(self.base, wrap)

    def full_grads(self) -> dict[str, Tensor]:
        return {name: grad.half().to(grad.dtype) for name, grad in self.base.full_grads().items()}


@mutant(
    FaultKind.LOSS_SCALE,
    Target("access.write_grad", model="similar", variant="idle", dtype="fp16"),
    origin=Origin.BLIND_10,
)
class ScalesWrittenGradsOfIdleWeights(EngineWrapper):
    """Multiplies a gradient in ``write_grad`` by the loss scale once more if the step did not use the weight."""

    def write_grad(self, name: str, value: Tensor) -> None:
        is_idle = name not in self.base.full_grads()
        self.base.write_grad(name, value * seams.loss_scaler(self.base).value if is_idle else value)


@mutant(
    FaultKind.LOSS_SCALE,
    Target("precision.grad_scaler", Part.OPTIMIZER, model="mixed", variant="hysteresis"),
    origin=Origin.BLIND_10,
)
class GrowthKeepsHysteresis(EngineWrapper):
    """Does not reset the count of overflows that the loss scale ignores when the scale grows."""

    def step(self) -> None:
        scaler = seams.loss_scaler(self.base)
        before = scaler.state_dict()
        self.base.step()
        after = scaler.state_dict()
        if after["scale"] > before["scale"]:
            scaler.load_state_dict({**after, "patience": before["patience"]})
