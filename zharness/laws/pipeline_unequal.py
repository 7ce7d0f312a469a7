"""Define the law pipeline.unequal_micro_batches: micro-batches may have different numbers of samples.

The numbers differ within one batch, or from batch to batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from zharness.engines.protocol import Feature
from zharness.errors import RoundedScenarioError
from zharness.law_kit.hints import add_hint
from zharness.law_kit.integer_gradients import hint_integer_gradients
from zharness.law_kit.integer_steps import BIAS_SIGNS
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Variant
from zharness.law_kit.optimizer_step import RecordedStep, compare_ranks_after_step, judge_step
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.tied_uses import average_uses
from zharness.laws.pipeline import (
    DIVIDED_BY_TWO_STAGES_HINT,
    MASKED_MODEL,
    MICRO_BATCHES,
    MODELS,
    SCHEDULES,
    compare_micro_losses,
    is_divided_by_two_stages,
    pipeline_law,
    require_schedule,
    select_schedule,
    train_micro_batches,
)
from zharness.mesh import TENSOR
from zharness.parity import Comparison
from zharness.parity.baseline import LocalResult, run_local
from zharness.parity.bounds import unit_roundoff
from zharness.parity.certificate import Exactness, certify_sums, division_exactness
from zharness.workload import Batch
from zharness.workload.models import SAMPLES

# The samples of each micro-batch: a mixed order, a shrinking order and a growing order. All numbers are powers of two,
# so a mean over samples is exact. Sums of two batches differ.
UNEQUAL = ((2, 4, 1, 2), (4, 2, 1, 1), (1, 2, 4, 4))
EQUAL = ((SAMPLES,) * MICRO_BATCHES,)
ODD_MODEL = "odd_chain"  # a stage's outputs have a different shape than its inputs
FEWEST_ON_TENSOR = 2  # batches, one of each size; weights in a third batch may need more bits than float32 has
Sizes = Sequence[Sequence[int]]  # the sizes of a batch's micro-batches, for the data coordinates in turn


def begin_with(first: int) -> Sizes:
    """Return the unequal sizes in turn from number ``first`` on, so that data coordinates have different sizes."""
    return (*UNEQUAL[first:], *UNEQUAL[:first])


def alternate(*samples: int) -> Sequence[Sizes]:
    """Return three batches whose micro-batches all have the first number of ``samples``, the second, and the first.

    The next data coordinate starts with the second number.
    """
    first, second = ((number,) * MICRO_BATCHES for number in samples)
    return ((first, second), (second, first), (first, second))


@dataclass(frozen=True)
class Batches:
    """The batches that a variant runs, and the variant's schedule; '' is the engine's default."""

    sizes: Sequence[Sizes]
    schedule: str = ""

    @property
    def features(self) -> tuple[Feature, ...]:
        """The features that an engine has to claim: unequal micro-batches, if a batch has different sizes."""
        has_unequal = any(len(set(own)) > 1 for sizes in self.sizes for own in sizes)
        return (Feature.UNEQUAL_MICRO_BATCHES,) if has_unequal else ()


WITHIN_A_BATCH: Sequence[Sizes] = tuple(map(begin_with, range(len(UNEQUAL))))
LARGE_FIRST, SMALL_FIRST = alternate(SAMPLES, SAMPLES // 2), alternate(SAMPLES // 2, SAMPLES)
IN_A_V = ("dualpipev", "zbv")  # schedules in which the first rank holds the first and the last stage
BATCHES: Mapping[str, Batches] = {
    **{schedule: Batches(WITHIN_A_BATCH, schedule) for schedule in SCHEDULES},
    "after_equal": Batches((EQUAL, begin_with(0), EQUAL)),
    "large_first": Batches(LARGE_FIRST),
    "small_first": Batches(SMALL_FIRST),
    **{f"large_first_{schedule}": Batches(LARGE_FIRST, schedule) for schedule in ("1f1b", "interleaved", *IN_A_V)},
    **{f"small_first_{schedule}": Batches(SMALL_FIRST, schedule) for schedule in IN_A_V},
}


def cut_batches(batches: Sequence[Batch], sizes: Sizes, data_coordinate: int) -> list[Batch]:
    """Return the first samples of each micro-batch of a data coordinate; ``sizes`` gives the number of samples."""
    own = sizes[data_coordinate % len(sizes)]
    return [cut_batch(batch, samples) for batch, samples in zip(batches, own, strict=True)]


def cut_batch(batch: Batch, samples: int) -> Batch:
    """Return the first samples of a batch."""
    return batch.map_tensors(lambda tensor: tensor[:samples])


def number_micro_batches(batch: int) -> range:
    """Return the numbers of the micro-batches of batch number ``batch``."""
    return range(batch * MICRO_BATCHES, (batch + 1) * MICRO_BATCHES)


def observe_unequal_micro_batches(ctx: RankContext) -> None:
    """Run batches of micro-batches of several sizes, each with a step, and record losses, gradients and weights."""
    engine = ctx.build_engine(optimizer=BIAS_SIGNS, options=select_schedule(BATCHES[ctx.variant].schedule))
    ctx.record_training_state(engine, 0)
    for number, sizes in enumerate(BATCHES[ctx.variant].sizes):
        batches = cut_batches(list(map(ctx.batch, number_micro_batches(number))), sizes, ctx.data_coordinate)
        ctx.record("losses", train_micro_batches(engine, batches, ctx.spec.loss), number)
        ctx.record("grads", engine.full_grads(), number)
        engine.step()
        engine.zero_grad()
        ctx.record_training_state(engine, number + 1)
    engine.close()


def judge_unequal_micro_batches(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare losses and gradients with plain PyTorch's on each micro-batch, and steps with the optimizer's formula.

    The gradient of a batch is the unweighted mean over its micro-batches, because each loss is a mean over the samples
    of one micro-batch. On tp, comparisons end with the third batch if a sum of it is rounded.
    """
    for number, sizes in enumerate(BATCHES[ctx.variant].sizes):
        weights = ctx.rank_records("params", number)[0]
        columns = [list_batches(ctx, number, sizes, at) for at in range(ctx.data_size)]
        micros = [[run_plain(ctx, batch, weights) for batch in row] for row in zip(*columns, strict=True)]
        exact = certify_batch(ctx, [batch for column in columns for batch in column], weights)
        if TENSOR in ctx.mesh.axes and not exact:
            if number < FEWEST_ON_TENSOR:
                raise RoundedScenarioError(f"a sum of batch {number} is rounded: no engine with tp can be judged by it")
            return
        yield from compare_micro_losses(ctx, micros, number)
        for comparison in ctx.compare_reduced_grads("grads", micros, number, exact):
            explained = hint_integer_gradients(ctx, comparison, columns, weights, number)
            yield hint_two_stages(ctx, explained, columns, weights, number)
        yield from judge_step(ctx, BIAS_SIGNS, ctx.rank_records("grads", number)[0], RecordedStep(number))
        yield from compare_ranks_after_step(ctx, RecordedStep(number + 1))


def hint_two_stages(
    ctx: JudgeContext,
    comparison: Comparison,
    columns: Sequence[Sequence[Batch]],
    weights: Mapping[str, Tensor],
    number: int,
) -> Comparison:
    """Add a hint to a mismatch of a tied weight if two stages divided its gradient in batch ``number``."""
    mismatch = comparison.mismatch
    if mismatch is None:
        return comparison
    uses = average_uses(ctx.baseline, mismatch.parameter, zip(*columns, strict=True), weights)
    grad = ctx.rank_records("grads", number)[mismatch.seen_on][mismatch.parameter]
    return add_hint(comparison, DIVIDED_BY_TWO_STAGES_HINT) if is_divided_by_two_stages(grad, uses) else comparison


def list_batches(ctx: JudgeContext, number: int, sizes: Sizes, data_coordinate: int) -> list[Batch]:
    """Return the micro-batches that a data coordinate gets in batch ``number``."""
    whole = [ctx.baseline.batch(data_coordinate, micro) for micro in number_micro_batches(number)]
    return cut_batches(whole, sizes, data_coordinate)


def run_plain(ctx: JudgeContext, batch: Batch, weights: Mapping[str, Tensor]) -> LocalResult:
    """Return plain PyTorch's loss and gradients of a micro-batch at ``weights``."""
    return run_local(ctx.baseline.build_module(weights), batch, ctx.baseline.objective)


def certify_batch(ctx: JudgeContext, batches: Sequence[Batch], weights: Mapping[str, Tensor]) -> Exactness:
    """Return whether the gradients of ``batches`` at ``weights``, and their mean, are exact.

    The number of terms is a power of two. If an engine divides each term, the terms are integers divided by the number
    of terms times the samples of the largest micro-batch, and the sum of the terms is no larger than a term. If the
    engine divides the sum, the terms are integers divided by the samples alone, and the sum is larger by the number of
    terms. Both ways need the same number of bits.
    """
    baseline, terms, dtype = ctx.baseline, len(batches), max(ctx.dtype, ctx.reduce_dtype, key=unit_roundoff)
    certificates = [
        certify_sums(baseline, [(batch, baseline.objective)], dtype, terms * SAMPLES // batch.num_samples, weights)
        for batch in batches
    ]
    return next((each for each in (division_exactness(terms), *certificates) if not each), Exactness(True))


LAWS = (
    pipeline_law(
        "unequal_micro_batches",
        "micro-batches of different sizes, in one batch or two, give plain PyTorch's losses, mean gradient and step",
        observe_unequal_micro_batches,
        judge_unequal_micro_batches,
        tuple(
            Variant(name, run.features, schedules=require_schedule(run.schedule), micro_batches=MICRO_BATCHES)
            for name, run in BATCHES.items()
        ),
        models=(*MODELS, MASKED_MODEL, ODD_MODEL),
        kept_because="the only law of a pipeline whose stages exchange tensors of several shapes",
    ),
)
