"""Define the law precision.grad_scaler: fp16's dynamic loss scale changes like that of torch.amp.GradScaler.

A step is skipped on all ranks if the gradients of any rank overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, cast

import torch
from torch import Tensor, nn

from zharness.device import compute_device_type
from zharness.engines.protocol import Absent, AccumulationOwner, Engine, Feature, OptimizerSpec
from zharness.law_kit.clipping import judge_clip_factor
from zharness.law_kit.engine_facts import collect_engine_facts
from zharness.law_kit.hints import SCALED_HINT
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Variant
from zharness.law_kit.optimizer_step import (
    RecordedStep,
    compare_published_weights,
    compare_ranks_after_step,
    judge_step,
)
from zharness.law_kit.rank_actions import shared_folder
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.law_kit.record_comparisons import compare_records
from zharness.laws.precision.common import precision_law
from zharness.parity import Comparison, Part, compare_bitwise

ADAMW = OptimizerSpec(name="adamw", args={"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.1})

STEPS = 6

# A different factor for every step: if a skipped step advances the schedule, the next learning rate shows it.
SCHEDULED_ADAMW = replace(ADAMW, schedule=tuple(2.0**-made for made in range(STEPS)))

FP16_OPTIONS = {"fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 6}}

NAN_VARIANT, NEGATIVE_VARIANT = "nan", "negative"  # the values of overflowing gradients; infinities in other variants

RESUMED_VARIANT, RESUME_STEP = "resumed", 3  # the load is after a skipped step, inside a growth interval

WINDOW_VARIANT, WINDOW = "2_by_engine", 2  # the first micro-batch of a window overflows

CLIPPED_VARIANT, CLIP_NORM = "clipped", 1e-2  # far below every step's gradient norm, so that it clips

HYSTERESIS_VARIANT, HYSTERESIS = "hysteresis", 2  # the second overflow since the scale grew halves it
HYSTERESIS_RESUMED_VARIANT = "hysteresis_resumed"  # the first of the two overflows is before the load
CONSECUTIVE_VARIANT = "consecutive_hysteresis"  # two overflows without a good step in between halve it
LONG_WINDOW = 1000  # good steps before the scale grows: more than the law makes
MINIMUM_VARIANT, MINIMUM = "minimum", 48.0  # a number below the scale that is not a power of two

# The forward runs under torch.autocast, with the weights in fp32.
AUTOCAST, AUTOCAST_CLIPPED, AUTOCAST_RESUMED = AUTOCAST_VARIANTS = ("autocast", "autocast_clipped", "autocast_resumed")

CLIPPED_VARIANTS = (CLIPPED_VARIANT, AUTOCAST_CLIPPED)
RESUMED_VARIANTS = (RESUMED_VARIANT, HYSTERESIS_RESUMED_VARIANT, AUTOCAST_RESUMED)


@dataclass(frozen=True)
class ScalerSettings:
    """The options of the engine in a law variant, and the rules by which its loss scale changes.

    The scale begins at ``initial``. ``growth_interval`` good steps in a row double it. The last of ``hysteresis``
    overflows halves it, but not below ``minimum``. The count of overflows restarts when the scale grows and, if
    ``is_consecutive``, after every good step.
    """

    options: Mapping[str, Any]
    initial: float = 2.0**6
    growth_interval: int = 2
    hysteresis: int = 1
    is_consecutive: bool = False
    minimum: float = 0.0


def fp16_settings(**rules: Any) -> ScalerSettings:
    """Return the settings with ``rules``, and with the options of the section ``fp16`` that configure these rules."""
    settings = ScalerSettings({}, **rules)
    section = {
        **FP16_OPTIONS["fp16"],
        "loss_scale_window": settings.growth_interval,
        **({"hysteresis": settings.hysteresis} if settings.hysteresis > 1 else {}),
        **({"consecutive_hysteresis": True} if settings.is_consecutive else {}),
        **({"min_loss_scale": settings.minimum} if settings.minimum else {}),
    }
    return replace(settings, options={"fp16": section})


SCALER_SETTINGS: Mapping[str, ScalerSettings] = {
    **dict.fromkeys(
        ("fp16", RESUMED_VARIANT, CLIPPED_VARIANT, NAN_VARIANT, NEGATIVE_VARIANT, WINDOW_VARIANT), fp16_settings()
    ),
    HYSTERESIS_VARIANT: fp16_settings(hysteresis=HYSTERESIS),
    HYSTERESIS_RESUMED_VARIANT: fp16_settings(hysteresis=HYSTERESIS, growth_interval=LONG_WINDOW),
    CONSECUTIVE_VARIANT: fp16_settings(hysteresis=HYSTERESIS, growth_interval=LONG_WINDOW, is_consecutive=True),
    MINIMUM_VARIANT: fp16_settings(minimum=MINIMUM),
    **dict.fromkeys(
        AUTOCAST_VARIANTS,
        ScalerSettings({"torch_autocast": {"enabled": True, "dtype": "fp16"}}, initial=2.0**16, growth_interval=2000),
    ),
}


class BadColumnGrad(torch.autograd.Function):
    """An autograd.Function that returns a copy of its input and fills one column of its gradient with a value."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, value: float, column: int) -> Tensor:
        """Return a copy of ``hidden``."""
        ctx.value, ctx.column = value, column
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient with the column replaced by the value."""
        bad = grads[0].clone()
        bad[:, ctx.column] = ctx.value
        return bad, None, None


class Overflow(Enum):
    """The part of a rank's gradients that is infinite in one step.

    With PART, only the last row of the first layer and the last element of its bias are infinite. If gradients are
    sharded, a single rank owns these elements, even if both are in one flat tensor. This rank has to make the other
    ranks skip the step.
    """

    NONE = "none"
    PART = "of one row"
    WHOLE = "all"


def get_window(variant: str) -> int:
    """Return the number of micro-batches of a step in a law variant."""
    return WINDOW if variant == WINDOW_VARIANT else 1


def get_planned_overflow(step: int, rank: int, ranks: int, micro: int) -> Overflow:
    """Return the overflow of a data coordinate ``rank`` in a micro-batch.

    The first micro-batch of step 1 overflows as a WHOLE on the first rank. The first micro-batch of step 4 overflows in
    PART on the last rank.
    """
    if micro > 0:
        return Overflow.NONE
    return {(1, 0): Overflow.WHOLE, (4, ranks - 1): Overflow.PART}.get((step, rank), Overflow.NONE)


def run_overflowing_forward(
    model: Callable[..., Tensor], inputs: Tensor, overflow_kind: Overflow, variant: str
) -> Tensor:
    """Run the forward of a model or engine, and make a part of its gradients overflow if ``overflow_kind`` is PART."""
    if overflow_kind is not Overflow.PART:
        return model(inputs)
    value = torch.nan if variant == NAN_VARIANT else torch.inf
    return model(inputs, transform=lambda hidden: BadColumnGrad.apply(hidden, value, -1))  # type: ignore[no-untyped-call]


def apply_loss_overflow(loss: Tensor, overflow_kind: Overflow, variant: str, module: nn.Module) -> Tensor:
    """Return ``loss``; if ``overflow_kind`` is WHOLE, change the loss so that all its gradients overflow.

    In the variant ``nan`` the gradients are NaN. In the variant ``negative`` only the gradient of one bias overflows,
    to minus infinity; every rank reads this bias, because a read may be a collective.
    """
    is_bad = overflow_kind is Overflow.WHOLE
    if variant == NEGATIVE_VARIANT:
        return loss - (torch.inf if is_bad else 0.0) * cast(Tensor, module.get_submodule("first").bias).sum()
    return loss * ((torch.nan if variant == NAN_VARIANT else torch.inf) if is_bad else 1.0)


def observe_scaler(ctx: RankContext) -> None:
    """Train steps, of which two overflow, and record loss scale, skipped steps and learning rates after each step.

    Variants of CLIPPED_VARIANTS clip the gradients, and record the norm of each step that did not overflow.
    """
    options = SCALER_SETTINGS[ctx.variant].options
    clip = CLIP_NORM if ctx.variant in CLIPPED_VARIANTS else None
    window = get_window(ctx.variant)
    owner = AccumulationOwner.ENGINE if window > 1 else AccumulationOwner.CALLER
    engine = ctx.build_engine(
        optimizer=SCHEDULED_ADAMW,
        options=options,
        clip=clip,
        accumulation_steps=window,
        accumulation_owner=owner,
    )
    for step in range(STEPS):
        if ctx.variant in RESUMED_VARIANTS and step == RESUME_STEP:
            engine = save_and_resume(ctx, engine, ctx.build_engine(optimizer=SCHEDULED_ADAMW, options=options))
        ctx.record_training_state(engine, step)
        for micro in range(window):
            overflow = get_planned_overflow(step, ctx.data_coordinate, ctx.data_size, micro)
            batch = ctx.batch(step * window + micro)
            loss = ctx.spec.loss(run_overflowing_forward(engine, batch.inputs, overflow, ctx.variant), batch.target)
            engine.backward(apply_loss_overflow(loss, overflow, ctx.variant, engine.module))
            if micro + 1 < window:
                engine.step()
        ctx.record("grads", engine.full_grads(), step)
        engine.step()
        if clip is not None:
            norm = engine.grad_norm()
            ctx.record("norm", {"norm": scalar(torch.nan if norm is None else norm)}, step)
        if window == 1:  # an engine that owns accumulation starts the next window itself
            engine.zero_grad()
        observations = engine.observe()
        scaler_state = (observations.loss_scale, observations.skipped_steps)
        scale, skipped = (value if isinstance(value, (int, float)) else -1 for value in scaler_state)
        ctx.record("scaler", {"scale": scalar(scale), "skipped": scalar(skipped)}, step)
        rates = () if isinstance(observations.learning_rates, Absent) else observations.learning_rates
        ctx.record("rates", {str(group): scalar(rate) for group, rate in enumerate(rates)}, step)
    ctx.record_training_state(engine, STEPS)
    engine.close()


def save_and_resume(ctx: RankContext, engine: Engine, target: Engine) -> Engine:
    """Save a checkpoint of ``engine``, load it into ``target``, and return ``target``.

    The learning rates, loss scale and number of skipped steps of both engines are recorded. Every rank has to call this
    function.
    """
    ctx.record("facts", collect_engine_facts(engine), 0)
    with shared_folder() as folder:
        engine.save(folder)
        engine.close()
        target.load(folder)
    ctx.record("facts", collect_engine_facts(target), 1)
    return target


def has_finite_grads(ctx: JudgeContext, step: int, rank: int, scale: float) -> bool:
    """Return whether plain PyTorch's gradients of one rank's scaled loss are finite at the engine's weights."""
    is_autocast = ctx.variant in AUTOCAST_VARIANTS
    low = replace(ctx.baseline, dtype=ctx.dtype if is_autocast else torch.float16)
    model, window = low.build_module(ctx.rank_records("params", step)[0]), get_window(ctx.variant)
    for micro in range(window):
        batch = ctx.baseline.batch(rank, step * window + micro)
        overflow = get_planned_overflow(step, rank, ctx.data_size, micro)
        with torch.autocast(compute_device_type(), torch.float16, enabled=is_autocast):
            output = run_overflowing_forward(model, batch.inputs.to(low.dtype), overflow, ctx.variant)
        loss = apply_loss_overflow(low.objective(output, batch), overflow, ctx.variant, model)
        (loss * torch.tensor(scale / window)).backward()  # type: ignore[no-untyped-call]
    return all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def judge_scaler(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare loss scale and skipped steps with those of torch.amp.GradScaler, and judge each optimizer step.

    The GradScaler gets a single gradient. In each step, this gradient is finite if plain PyTorch's gradients are finite
    on all ranks. If an overflow is tolerated, or would halve the scale below the minimum, the judge sets the
    GradScaler's scale. With a minimum, weights after a good step are compared between ranks only, not with AdamW's
    formula.
    """
    settings = SCALER_SETTINGS[ctx.variant]
    scaler = torch.amp.GradScaler(
        compute_device_type(), init_scale=settings.initial, growth_interval=settings.growth_interval
    )
    weight = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(torch.zeros(()))
    skipped, remaining = 0, settings.hysteresis
    for step in range(STEPS):
        grads = ctx.rank_records("grads", step)[0]
        finite = all(has_finite_grads(ctx, step, rank, scaler.get_scale()) for rank in range(ctx.data_size))
        summed = all(bool(grad.isfinite().all()) for grad in grads.values())
        yield compare_bitwise(ctx.location("loss", Part.REDUCTION, step), scalar(finite), scalar(summed))
        weight.grad = torch.tensor(1.0 if finite else torch.inf)
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if not finite and remaining > 1:
            scaler.update(before)
            remaining -= 1
        elif scaler.get_scale() > before or (finite and settings.is_consecutive):
            remaining = settings.hysteresis
        if scaler.get_scale() < settings.minimum:
            scaler.update(settings.minimum)
        skipped += not finite
        for rank, record in enumerate(ctx.rank_records("scaler", step)):
            place = ctx.location("loss", Part.OPTIMIZER, step, rank)
            yield compare_bitwise(place, scalar(scaler.get_scale()), record["scale"])
            yield compare_bitwise(place, scalar(skipped), record["skipped"])
        if step == RESUME_STEP and ctx.variant in RESUMED_VARIANTS:
            yield from compare_records(ctx, "facts", "facts", 0, 1, Part.OPTIMIZER)
        yield from compare_learning_rates(ctx, step, step + 1 - skipped)
        recorded_step = RecordedStep(step, "masters", skipped_steps=skipped)
        if not finite:
            yield from compare_skipped_step(ctx, step)
        elif not settings.minimum:  # a scale that is not a power of two rounds the scaled gradients
            scaled = {name: grad * before for name, grad in grads.items()}
            suspects = {SCALED_HINT: scaled}
            clip_factor = yield from judge_clip_factor(ctx, "norm", step, grads, CLIP_NORM, suspects)
            yield from judge_step(ctx, SCHEDULED_ADAMW, grads, recorded_step, clip_factor)
        yield from compare_ranks_after_step(ctx, RecordedStep(step + 1, "masters"))
        yield from compare_published_weights(ctx, RecordedStep(step + 1, "masters"), "params")


def compare_learning_rates(ctx: JudgeContext, step: int, steps_made: int) -> Iterator[Comparison]:
    """Check that every reported learning rate is that of the schedule after ``steps_made`` steps."""
    wanted = scalar(SCHEDULED_ADAMW.args["lr"] * SCHEDULED_ADAMW.schedule[min(steps_made, STEPS - 1)])
    for rank, record in enumerate(ctx.rank_records("rates", step)):
        for group, rate in record.items():
            yield compare_bitwise(
                ctx.location(f"learning rate of group {group}", Part.OPTIMIZER, step, rank), wanted, rate
            )


def compare_skipped_step(ctx: JudgeContext, step: int) -> Iterator[Comparison]:
    """Check that a skipped step changed neither master weights nor optimizer state."""
    for label in ("masters", "state"):
        before, after = ctx.rank_records(label, step)[0], ctx.rank_records(label, step + 1)[0]
        for name, tensor in before.items():
            yield compare_bitwise(ctx.location(name, Part.OPTIMIZER, step), tensor, after[name])


LAWS = (
    precision_law(
        "grad_scaler",
        "fp16's loss scale is torch.amp.GradScaler's, also after a load; if one rank overflows, all skip the step",
        observe_scaler,
        judge_scaler,
        features=(),
        variants=(
            Variant("fp16", (Feature.LOSS_SCALER,)),
            Variant(RESUMED_VARIANT, (Feature.LOSS_SCALER, Feature.CHECKPOINT)),
            Variant(CLIPPED_VARIANT, (Feature.LOSS_SCALER, Feature.CLIP)),
            Variant(WINDOW_VARIANT, (Feature.LOSS_SCALER, Feature.ENGINE_ACCUMULATION)),
            Variant(NAN_VARIANT, (Feature.LOSS_SCALER,)),
            *(
                Variant(name, (Feature.LOSS_SCALER,))
                for name in (HYSTERESIS_VARIANT, CONSECUTIVE_VARIANT, MINIMUM_VARIANT)
            ),
            Variant(HYSTERESIS_RESUMED_VARIANT, (Feature.LOSS_SCALER, Feature.CHECKPOINT)),
            Variant(NEGATIVE_VARIANT, (Feature.LOSS_SCALER, Feature.OUTSIDE_FORWARD)),
            Variant(AUTOCAST, (Feature.AUTOCAST_SCALER,)),
            Variant(AUTOCAST_CLIPPED, (Feature.AUTOCAST_SCALER, Feature.CLIP)),
            Variant(AUTOCAST_RESUMED, (Feature.AUTOCAST_SCALER, Feature.CHECKPOINT)),
        ),
        kept_because="the only law with overflows, skipped steps and a loss scale that changes",
        weights_stay_integers=True,  # steps are judged by the engine's own gradients, and overflows are infinities
    ),
)
