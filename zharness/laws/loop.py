"""Define the laws of the group ``loop``: engines that run whole trainings compute what plain PyTorch computes.

Such an engine has its own loop over batches and steps (``CallForm.WHOLE_TRAINING``). It gets the samples of all ranks,
and the laws compare the loss, the norm, the gradients and the weights of each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zharness.engines import optimizers
from zharness.engines.protocol import (
    IGNORED,
    AccumulationOwner,
    CallForm,
    Feature,
    GroupSpec,
    OptimizerSpec,
    require_train,
)
from zharness.errors import EngineContractError
from zharness.law_kit.clipping import NO_CLIPPING, ClipFactor, judge_reported_norm
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, Variant
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.law_kit.record_comparisons import compare_initial_weights
from zharness.law_kit.training_run import total_norm_and_bound
from zharness.parity import Comparison, Part, Tier, compare_bitwise, compare_within_bound
from zharness.parity.baseline import LocalResult, run_local
from zharness.parity.bounds import BoundedTensor, gamma
from zharness.parity.certificate import Exactness, certify_exactness, is_power_of_two
from zharness.workload import Batch

LIMIT = 2.0**-3
# Gradients are integers divided by at most 16, the number of samples in a step of 2 ranks, so that steps at rate 16
# keep the weights integers. Adagrad moves weights less, but loses its parameter groups on DeepSpeed.
LOOP_STEPS = OptimizerSpec("sgd", {"lr": 0.0}, groups=(GroupSpec("blocks.[123].*bias", {"lr": 16.0}),))


@dataclass(frozen=True)
class Training:
    """A training: the micro-batches of each rank, the micro-batches of a step, and the clipping norm.

    With ``counts_items``, some targets are ignored, a different number on each rank and in each micro-batch.
    """

    micro_batches: int
    window: int
    clip: float | None = None
    counts_items: bool = False

    @property
    def steps(self) -> tuple[range, ...]:
        """The numbers of the micro-batches of each step."""
        starts = range(0, self.micro_batches, self.window)
        return tuple(range(start, min(start + self.window, self.micro_batches)) for start in starts)


TRAININGS: Mapping[str, Training] = {
    "single": Training(2, 1),
    "accumulated": Training(4, 2),
    "remainder": Training(3, 2),
    "items": Training(2, 1, counts_items=True),
    "accumulated_items": Training(4, 2, counts_items=True),
    "clipped": Training(4, 2, clip=LIMIT),
}


def ignore_targets(batch: Batch, rank: int, micro: int) -> Batch:
    """Return the batch with ignored targets: 1 or 3 samples count, or 2 in micro-batches with an odd number.

    The counts of a window add up to a power of two if the number of ranks is even.
    """
    counted = 2 if micro % 2 else 1 + 2 * (rank % 2)
    target = batch.target.clone()
    target[counted:] = IGNORED
    return Batch(batch.inputs, target, batch.seed)


def add_counted_products(output: Tensor, target: Tensor, items: Tensor) -> Tensor:
    """Return the sum of output times target over the elements that are not ignored, divided by ``items``."""
    counted = torch.where(target == IGNORED, torch.zeros_like(target), target)
    return (output * counted).sum() / items


def observe_loop(ctx: RankContext) -> None:
    """Train the samples of all ranks, and record loss, norm, gradients and weights of each step."""
    training = TRAININGS[ctx.variant]
    engine = ctx.build_engine(
        optimizer=LOOP_STEPS,
        accumulation_steps=training.window,
        accumulation_owner=AccumulationOwner.ENGINE,
        clip=training.clip,
    )
    ctx.record_weights(engine, 0)
    samples: list[tuple[Tensor, Tensor]] = []
    for micro in range(training.micro_batches):
        for rank in range(ctx.data_size):
            batch = ctx.spec.micro_batch(ctx.seed, rank, micro)
            batch = ignore_targets(batch, rank, micro) if training.counts_items else batch
            samples.extend(zip(batch.inputs, batch.target, strict=True))
    loss: Callable[..., Tensor] = add_counted_products if training.counts_items else ctx.spec.loss
    steps = require_train(engine).train(samples, loss, training.counts_items)
    if len(steps) != len(training.steps):
        raise EngineContractError(f"train made {len(steps)} steps of {len(training.steps)} windows")
    for number, step in enumerate(steps):
        ctx.record("loss", {"loss": scalar(step.loss)}, number)
        ctx.record("norm", {"norm": scalar(step.norm)}, number)
        ctx.record("grads", step.grads, number)
        ctx.record("params", step.params, number + 1)
    engine.close()


def compute_micro(
    ctx: JudgeContext, training: Training, micro: int, items: int, params: Mapping[str, Tensor]
) -> list[LocalResult]:
    """Return the baseline's loss and gradients of one micro-batch of every rank, at ``params``."""
    if not training.counts_items:
        return ctx.compute_local_grads(micro, params)

    def objective(output: Tensor, batch: Batch) -> Tensor:
        """Return this micro-batch's part of the loss of the step."""
        return add_counted_products(output, batch.target, torch.tensor(float(items)))

    return [
        run_local(
            ctx.baseline.build_module(params), ignore_targets(ctx.baseline.batch(rank, micro), rank, micro), objective
        )
        for rank in range(ctx.data_size)
    ]


def count_items(ctx: JudgeContext, micros: range) -> int:
    """Return the number of elements of all targets of a step that are not ignored."""
    batches = [
        ignore_targets(ctx.baseline.batch(rank, micro), rank, micro)
        for rank in range(ctx.data_size)
        for micro in micros
    ]
    return sum(int((batch.target != IGNORED).sum()) for batch in batches)


def judge_loop(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare loss, norm, gradients and weights of each step with plain PyTorch's, starting at the engine's weights."""
    training = TRAININGS[ctx.variant]
    yield from compare_initial_weights(ctx)
    weights = {name: value.clone() for name, value in ctx.rank_records("params", 0)[0].items()}
    optimizer = optimizers.build(weights, LOOP_STEPS)
    for number, micros in enumerate(training.steps):
        items, terms = count_items(ctx, micros), len(micros) * ctx.data_size
        rows = [compute_micro(ctx, training, micro, items, weights) for micro in micros]
        exact = certify_exactness(ctx.baseline, micros, ctx.dtype, params=weights)
        if training.counts_items and not is_power_of_two(items):
            exact = Exactness(False, f"a division by {items} items is not exact")
        scale = float(terms) if training.counts_items else 1.0
        yield from compare_reported_losses(ctx, rows, number, bool(exact), scale)
        yield from judge_gradients(ctx, rows, number, exact, scale, training.clip)
        for name, weight in weights.items():
            weight.grad = ctx.rank_records("grads", number)[0][name].clone()
        optimizer.step()
        for rank, record in enumerate(ctx.rank_records("params", number + 1)):
            for name, weight in weights.items():
                yield compare_bitwise(ctx.location(name, Part.OPTIMIZER, number, rank), weight, record[name])


def compare_reported_losses(
    ctx: JudgeContext, rows: list[list[LocalResult]], number: int, exact: bool, scale: float
) -> Iterator[Comparison]:
    """Check that the loss that every rank reports is ``scale`` times the mean over micro-batches and ranks."""
    losses = torch.stack([local.loss.double() for row in rows for local in row])
    error = torch.zeros(()) if exact else gamma(len(losses) + 2, ctx.dtype) * losses.abs().mean() * scale
    for rank, record in enumerate(ctx.rank_records("loss", number)):
        place = ctx.location("loss", Part.FORWARD, number, rank)
        yield compare_within_bound(place, scale * losses.mean(), record["loss"], error.double())


def judge_gradients(
    ctx: JudgeContext, rows: list[list[LocalResult]], number: int, exact: Exactness, scale: float, clip: float | None
) -> Iterator[Comparison]:
    """Compare the norm and the gradients of one step; clipped gradients are compared within the bound of clipping."""
    if clip is None:
        yield from ctx.compare_reduced_grads("grads", rows, number, exact, scale)
    means = ctx.compute_expected_grads(rows, scale, {})
    norm, error = total_norm_and_bound({name: mean.value.to(ctx.dtype) for name, mean in means.items()})
    reported = yield from judge_reported_norm(ctx, "norm", number, norm, error)
    if clip is None:
        return
    factor = NO_CLIPPING if reported is None else ClipFactor.from_norm(clip, norm, error, reported)
    for name, mean in means.items():
        clipped = factor.apply_to(BoundedTensor.exact(mean.value.to(ctx.dtype)) if exact else mean)
        for rank, record in enumerate(ctx.rank_records("grads", number)):
            place = ctx.location(name, Part.REDUCTION, number, rank)
            yield compare_within_bound(place, clipped.value, record[name], clipped.error)


def loop_law(name: str, statement: str, variants: Mapping[str, tuple[Feature, ...]], kept_because: str) -> Law:
    """Build a law of the group ``loop``; ``variants`` maps trainings to the features that they need.

    An engine multiplies a loss that counts items by the number of ranks. If this number is not a power of two, the
    product rounds the factor of every gradient before the matrix products, and gradients differ from the baseline's.
    """
    return Law(
        name=f"loop.{name}",
        statement=statement,
        tier=Tier.STAGED,
        models=("chain",),
        observe=observe_loop,
        judge=judge_loop,
        variants=tuple(
            Variant(variant, features, exact_by_sum=TRAININGS[variant].counts_items)
            for variant, features in variants.items()
        ),
        dtypes=("fp32",),
        form=CallForm.WHOLE_TRAINING,
        kept_because=kept_because,
    )


LAWS = (
    loop_law(
        "training",
        "each step of a loop trains its samples with their mean gradient, also if the last step has fewer samples",
        {"single": (), "accumulated": (), "remainder": ()},
        kept_because="the only law of the batches that an engine's own loop trains",
    ),
    loop_law(
        "items",
        "with unequal item counts, a step's loss is the sum over all its items on all ranks, divided by their number",
        {"items": (), "accumulated_items": ()},
        kept_because="the only law of a loss that is normalized over ranks and micro-batches",
    ),
    loop_law(
        "clipping",
        "a loop clips the mean gradient of all micro-batches and ranks once, by the norm of this mean",
        {"clipped": (Feature.CLIP,)},
        kept_because="the only law of clipping in a loop of the engine",
    ),
)
