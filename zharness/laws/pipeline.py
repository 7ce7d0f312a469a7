"""Define the laws of the group ``pipeline``: engines that run whole batches train like plain accumulation.

Callers of such an engine call neither forward nor backward (``CallForm.WHOLE_BATCH``). They pass the micro-batches of a
step and the loss function, and the laws compare each micro-batch's loss, the mean gradient and the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from zharness.engines.protocol import CallForm, Engine, Feature, OptimizerSpec, require_train_batch
from zharness.errors import EngineContractError
from zharness.law_kit.clipped_step import judge_clipped_step
from zharness.law_kit.clipping import judge_clip_factor
from zharness.law_kit.hints import add_hint
from zharness.law_kit.integer_gradients import hint_integer_gradients
from zharness.law_kit.integer_steps import BIAS_SIGNS
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, MeshSupport, Variant
from zharness.law_kit.optimizer_step import RecordedStep, compare_ranks_after_step, judge_step
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.law_kit.record_comparisons import compare_initial_weights
from zharness.law_kit.split_sums import SplitBatches, compare_split_batches, require_exact_sums, splits_sums
from zharness.law_kit.tied_uses import compute_use_means
from zharness.laws.training.common import JudgeFunction, ObserveFunction
from zharness.parity import Comparison, Part, Tier, compare_bitwise
from zharness.parity.baseline import LocalResult
from zharness.parity.certificate import certify_exactness
from zharness.workload import Batch

MICRO_BATCHES = 4  # a power of two, so that a mean is exact; a zero-bubble schedule of two ranks needs as many
MOMENTUM_SGD = OptimizerSpec(name="sgd", args={"lr": 1.0, "momentum": 0.5})
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev")
MODELS = ("chain", "skips", "tied_chain", "tied_ends")
MASKED_MODEL = "masked_chain"  # stages also send integers, for which no gradients come back
RANDOM_MODEL = "random_chain"  # stages send numbers with more bits than half precision has
DIVIDED_BY_TWO_STAGES_HINT = (
    "the terms of one use of the tied weight were divided by the number of micro-batches once more"
)
CLIP = 1.0  # below every gradient norm of these models, so that it clips
CLIPPED_SCHEDULES = ("gpipe", "1f1b", "zbv", "dualpipev")


@dataclass(frozen=True)
class BatchShape:
    """The number of micro-batches of a batch, and the factor, a power of two, by which its loss is multiplied."""

    micro_batches: int = MICRO_BATCHES
    factor: float = 1


DEFAULT_SHAPE = BatchShape()
WINDOW = BatchShape(micro_batches=2)  # few terms, so that float32 holds their sums exactly
SINGLE = BatchShape(micro_batches=1)  # torch's pipelines around DDP crash or divide twice after batches of several


@dataclass(frozen=True)
class SecondBatch:
    """The shapes of two batches, and whether a step is made between them."""

    stepped: bool
    shape: BatchShape = WINDOW
    first_shape: BatchShape = WINDOW


WINDOWS: Mapping[str, SecondBatch] = {
    "accumulated": SecondBatch(stepped=False),
    "accumulated_singles": SecondBatch(stepped=False, shape=SINGLE, first_shape=SINGLE),
    "stepped": SecondBatch(stepped=True, shape=replace(WINDOW, factor=2)),
    "other_batch": SecondBatch(stepped=True, shape=BatchShape(micro_batches=4, factor=2)),
}


def multiply_loss(loss: Callable[[Any, Any], Tensor], factor: float, output: Any, target: Any) -> Tensor:
    """Return ``factor`` times the loss."""
    return factor * loss(output, target)


def multiply_result(local: LocalResult, factor: float) -> LocalResult:
    """Return the loss and gradients of ``factor`` times the loss; ``factor`` is a power of two."""
    return LocalResult(factor * local.loss, {name: factor * grad for name, grad in local.grads.items()})


def train_batch(ctx: RankContext, engine: Engine, number: int, shape: BatchShape) -> Mapping[str, Tensor]:
    """Run batch ``number``, and return the losses of its micro-batches, by the number of the micro-batch."""
    batches = [ctx.batch(number * MICRO_BATCHES + index) for index in range(shape.micro_batches)]
    loss = partial(multiply_loss, ctx.spec.loss, shape.factor) if shape.factor != 1 else ctx.spec.loss
    return train_micro_batches(engine, batches, loss)


def train_micro_batches(
    engine: Engine, batches: Sequence[Batch], loss: Callable[[Any, Any], Tensor]
) -> Mapping[str, Tensor]:
    """Run a batch of these micro-batches, and return their losses, by the number of the micro-batch.

    Raises EngineContractError if the engine does not return a loss for each micro-batch.
    """
    losses = require_train_batch(engine).train_batch([(batch.inputs, batch.target) for batch in batches], loss)
    if len(losses) != len(batches):
        raise EngineContractError(f"train_batch returned {len(losses)} losses for {len(batches)} micro-batches")
    return {f"loss of micro-batch {index}": loss for index, loss in enumerate(losses)}


def run_batch(ctx: RankContext, engine: Engine, number: int, shape: BatchShape = DEFAULT_SHAPE) -> None:
    """Run batch ``number``, and record the losses of its micro-batches and the full gradients after it."""
    ctx.record("losses", train_batch(ctx, engine, number, shape), number)
    ctx.record("grads", engine.full_grads(), number)


def select_schedule(name: str) -> Mapping[str, str]:
    """Return the engine option that selects a schedule; '' is the engine's default schedule."""
    return {"schedule": name} if name else {}


def require_schedule(name: str) -> tuple[str, ...]:
    """Return the schedules that a law variant requires: the named schedule, or none for '', the engine's default."""
    return (name,) if name else ()


def observe_training(ctx: RankContext, clip: float | None = None) -> None:
    """Run one batch with the schedule that the variant names, and make a step."""
    engine = ctx.build_engine(optimizer=MOMENTUM_SGD, options=select_schedule(ctx.variant), clip=clip)
    ctx.record_training_state(engine, 0)
    run_batch(ctx, engine, 0)
    engine.step()
    norm = engine.grad_norm()
    ctx.record("norm", {} if norm is None else {"norm": scalar(norm)})
    engine.zero_grad()
    ctx.record_training_state(engine, 1)
    engine.close()


def compute_batch(
    ctx: JudgeContext,
    number: int,
    params: Mapping[str, Tensor] | None = None,
    shape: BatchShape = DEFAULT_SHAPE,
) -> list[list[LocalResult]]:
    """Return the baseline's losses and gradients of each micro-batch of batch ``number``, at ``params``."""
    first = number * MICRO_BATCHES
    rows = [ctx.compute_local_grads(first + index, params) for index in range(shape.micro_batches)]
    return [[multiply_result(local, shape.factor) for local in row] for row in rows]


def require_exact_batch(ctx: JudgeContext, number: int, weights: Mapping[str, Tensor], shape: BatchShape) -> None:
    """Raise RoundedScenarioError if tp, which splits sums, could round a sum of the batch ``number``."""
    first = number * MICRO_BATCHES
    require_exact_sums(ctx, range(first, first + shape.micro_batches), weights)


def compare_micro_losses(ctx: JudgeContext, micros: list[list[LocalResult]], number: int = 0) -> Iterator[Comparison]:
    """Check that every rank got the losses of all micro-batches in order; with tp, call compare_split_losses."""
    if splits_sums(ctx):
        yield from compare_split_losses(ctx, micros, number)
        return
    for rank, record in enumerate(ctx.rank_records("losses", number)):
        for (name, loss), row in zip(record.items(), micros, strict=True):
            place = ctx.location(name, Part.FORWARD, number, rank)
            yield compare_bitwise(place, row[ctx.data_coordinate(rank)].loss, loss)


def compare_split_losses(ctx: JudgeContext, micros: list[list[LocalResult]], number: int) -> Iterator[Comparison]:
    """Check that ranks of a data coordinate got equal losses, each closest to the plain loss of its own micro-batch.

    No bound holds for a loss whose sums tp splits, so the value is not compared.
    """
    records = ctx.rank_records("losses", number)
    for rank, record in enumerate(records):
        at = ctx.data_coordinate(rank)
        first, *_ = ctx.mesh.list_ranks(at, ctx.world_size)
        own = torch.stack([row[at].loss for row in micros])
        for index, (name, loss) in enumerate(record.items()):
            place = ctx.location(name, Part.FORWARD, number, rank)
            yield compare_bitwise(place, records[first][name], loss)
            distances = (own - loss).abs()
            is_nearest = bool(distances[index] <= distances.min())  # False if the loss is NaN
            mismatch = compare_bitwise(replace(place, name=f"nearest loss to {name}"), scalar(1), scalar(is_nearest))
            yield add_hint(mismatch, "it is nearer to the loss of another micro-batch")


def compare_batch_grads(ctx: JudgeContext, micros: list[list[LocalResult]]) -> Iterator[Comparison]:
    """Compare the gradients of the first batch with their mean over its micro-batches."""
    if splits_sums(ctx):
        yield from compare_split_batches(ctx, "grads", 0, SplitBatches(dict.fromkeys(range(MICRO_BATCHES), 1.0)))
        return
    exact = ctx.certify_exactness(range(MICRO_BATCHES))
    columns = [[ctx.baseline.batch(at, micro) for micro in range(MICRO_BATCHES)] for at in range(ctx.data_size)]
    for comparison in ctx.compare_reduced_grads("grads", micros, exact=exact):
        yield hint_integer_gradients(ctx, hint_divided_by_two_stages(ctx, comparison), columns)


def judge_training(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare losses and gradients bitwise, and weights and state after the step by SGD's formula."""
    yield from compare_initial_weights(ctx)
    micros = compute_batch(ctx, 0)
    yield from compare_micro_losses(ctx, micros)
    yield from compare_batch_grads(ctx, micros)
    yield from judge_step(ctx, MOMENTUM_SGD, ctx.rank_records("grads")[0], RecordedStep(0))
    yield from compare_ranks_after_step(ctx, RecordedStep(1))


def observe_norm(ctx: RankContext) -> None:
    """Run one batch, and make a step with clipping."""
    observe_training(ctx, CLIP)


def judge_norm(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare every rank's norm with the float64 norm of the full gradient, and the step with SGD's clipped step."""
    micros = compute_batch(ctx, 0)
    yield from compare_batch_grads(ctx, micros)
    reported = scalar("norm" in ctx.rank_records("norm")[0])
    yield add_hint(
        compare_bitwise(ctx.location("norm", Part.REDUCTION), scalar(1), reported), "the engine reports none"
    )
    grads = ctx.rank_records("grads")[0]
    factor = yield from judge_clip_factor(ctx, "norm", 0, grads, CLIP)
    yield from judge_step(ctx, MOMENTUM_SGD, grads, RecordedStep(0), factor)
    yield from compare_ranks_after_step(ctx, RecordedStep(1))


def judge_clip(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare gradients with the mean, and the step with SGD's step on gradients clipped by the norm of all stages."""
    yield from compare_batch_grads(ctx, compute_batch(ctx, 0))
    yield from judge_clipped_step(ctx, MOMENTUM_SGD, CLIP, "params")


def hint_divided_again(
    ctx: JudgeContext, comparison: Comparison, first: list[list[LocalResult]], second: list[list[LocalResult]]
) -> Comparison:
    """Add a hint to a mismatch of a gradient if the second batch divided the first batch's mean again.

    A batch of one micro-batch divides by 1, so it cannot show this error.
    """
    mismatch = comparison.mismatch
    if mismatch is None or len(second) == 1:
        return comparison
    name = mismatch.parameter
    means = [
        torch.stack([local.grads[name] for row in micros for local in row]).mean(dim=0) for micros in (first, second)
    ]
    if not torch.equal(ctx.rank_records("grads", 1)[mismatch.seen_on][name], means[0] / len(second) + means[1]):
        return comparison
    divided = "the gradient of the batch before was divided by the number of micro-batches once more"
    return add_hint(comparison, divided)


def hint_divided_by_two_stages(ctx: JudgeContext, comparison: Comparison, step: int = 0, first: int = 0) -> Comparison:
    """Add a hint to a mismatch of a tied weight whose gradient two stages divided by the number of micro-batches.

    The stage that ends first divides the whole accumulated gradient: its own terms, and the terms that the other stage
    has added for some micro-batches. The gradient was recorded at ``step``, after micro-batches from number ``first``
    on at the initial weights.
    """
    mismatch = comparison.mismatch
    if mismatch is None:
        return comparison
    uses = compute_use_means(ctx.baseline, mismatch.parameter, range(first, first + MICRO_BATCHES))
    grad = ctx.rank_records("grads", step)[mismatch.seen_on][mismatch.parameter]
    return add_hint(comparison, DIVIDED_BY_TWO_STAGES_HINT) if is_divided_by_two_stages(grad, uses) else comparison


def is_divided_by_two_stages(grad: Tensor, uses: Sequence[Tensor]) -> bool:
    """Return whether two stages divided the gradient of a tied weight; ``uses`` lists the terms of each use."""
    return any(
        torch.equal(
            grad,
            (use.sum(dim=0) + other_use[:done].sum(dim=0)) / MICRO_BATCHES**2
            + other_use[done:].sum(dim=0) / MICRO_BATCHES,
        )
        for use, other_use in permutations(uses, 2)
        for done in range(MICRO_BATCHES + 1)
    )


def observe_windows(ctx: RankContext) -> None:
    """Run two batches, with a step between them if the variant says so."""
    second = WINDOWS[ctx.variant]
    engine = ctx.build_engine(optimizer=BIAS_SIGNS)
    run_batch(ctx, engine, 0, second.first_shape)
    if second.stepped:
        engine.step()
        engine.zero_grad()
    ctx.record_weights(engine, 1)
    run_batch(ctx, engine, 1, second.shape)
    engine.close()


def judge_windows(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare losses, and the gradients after the second batch: its mean after a step, else the sum of both means."""
    variant, weights = WINDOWS[ctx.variant], ctx.rank_records("params", 1)[0]
    first = compute_batch(ctx, 0, shape=variant.first_shape)
    second = compute_batch(ctx, 1, weights, variant.shape)
    yield from compare_micro_losses(ctx, first)
    yield from compare_micro_losses(ctx, second, 1)
    second_batch = range(MICRO_BATCHES, MICRO_BATCHES + variant.shape.micro_batches)
    if variant.stepped:
        exact = certify_exactness(ctx.baseline, second_batch, ctx.dtype, params=weights)
        yield from ctx.compare_reduced_grads("grads", second, 1, exact)
    else:
        exact = ctx.certify_exactness(range(variant.first_shape.micro_batches)) and ctx.certify_exactness(second_batch)
        for comparison in ctx.compare_reduced_grads("grads", [*first, *second], 1, exact, scale=2.0):
            yield hint_divided_again(ctx, comparison, first, second)


def pipeline_law(
    name: str,
    statement: str,
    observe: ObserveFunction,
    judge: JudgeFunction,
    variants: tuple[Variant, ...],
    *features: Feature,
    kept_because: str,
    models: tuple[str, ...] = MODELS,
) -> Law:
    """Build a law of the group ``pipeline``; its models are exact, except RANDOM_MODEL."""
    return Law(
        name=f"pipeline.{name}",
        statement=statement,
        tier=Tier.STAGED,
        models=models,
        observe=observe,
        judge=judge,
        variants=variants,
        features=features,
        dtypes=("fp32",),
        mesh_support=MeshSupport.ONLY,
        judges_split_sums=RANDOM_MODEL in models,
        form=CallForm.WHOLE_BATCH,
        kept_because=kept_because,
    )


LAWS = (
    pipeline_law(
        "training",
        "every schedule gives the losses, mean gradients and steps of plain accumulation over the micro-batches",
        observe_training,
        judge_training,
        tuple(Variant(name, schedules=(name,), micro_batches=MICRO_BATCHES) for name in SCHEDULES),
        models=(*MODELS, MASKED_MODEL, RANDOM_MODEL),
        kept_because="the shortest law of a schedule: it names the wrong micro-batch or stage",
    ),
    pipeline_law(
        "windows",
        "a batch adds its mean gradient to the gradients since zero_grad, and uses the new weights after a step",
        observe_windows,
        judge_windows,
        tuple(Variant(name, () if window.stepped else (Feature.BATCHES_PER_STEP,)) for name, window in WINDOWS.items()),
        kept_because="the only law of two batches, between which a pipeline's schedule object keeps state",
    ),
    pipeline_law(
        "norm",
        "the norm that clips counts the gradient of each weight once over all stages, also that of a tied weight",
        observe_norm,
        judge_norm,
        tuple(Variant(name, schedules=(name,), micro_batches=MICRO_BATCHES) for name in CLIPPED_SCHEDULES),
        Feature.CLIP,
        kept_because="the only law of a norm over stages",
    ),
    pipeline_law(
        "clip",
        "gradients are clipped by the norm over all stages, also if the engine reports no norm",
        observe_norm,
        judge_clip,
        tuple(Variant(name, schedules=(name,), micro_batches=MICRO_BATCHES) for name in CLIPPED_SCHEDULES),
        Feature.CLIP,
        kept_because="the only law of clipping in a pipeline for engines that report no norm: pipeline.norm needs one",
    ),
)
