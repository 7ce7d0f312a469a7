"""Define the laws of the group ``pipeline`` about steps that all stages make in the same way: rates and overflows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from zharness.engines.protocol import Capabilities, Feature, OptimizerSpec
from zharness.law_kit.engine_facts import collect_engine_facts, compare_engine_facts
from zharness.law_kit.integer_steps import BIAS_SIGNS
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Variant
from zharness.law_kit.optimizer_step import RecordedStep, compare_ranks_after_step, judge_step
from zharness.law_kit.optimizers import UNIT_LR_SGD
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.law_kit.split_sums import SplitBatches, compare_split_batches, splits_sums
from zharness.laws.circumstances.not_finite import CLIPPED, Outcome, step_and_classify
from zharness.laws.mesh import CLIP
from zharness.laws.mesh_not_finite import judge_one_coordinate
from zharness.laws.pipeline import (
    MICRO_BATCHES,
    MODELS,
    MOMENTUM_SGD,
    RANDOM_MODEL,
    SINGLE,
    WINDOW,
    BatchShape,
    compare_micro_losses,
    compute_batch,
    pipeline_law,
    require_exact_batch,
    run_batch,
)
from zharness.mesh import TENSOR, Mesh
from zharness.parity import Comparison, Part, compare_bitwise

# Powers of two, so that a product with a rate is exact. With a rate of 1/8, a model of random weights does not diverge.
HALVING = replace(
    MOMENTUM_SGD, args={"lr": 0.125, "momentum": 0.5, "weight_decay": 0.25}, schedule=(1.0, 0.5, 0.25, 0.125)
)
# The rates of all steps that a law makes are integers, so the weights stay integers.
SIGNS_HALVING = replace(BIAS_SIGNS, schedule=(4.0, 2.0, 1.0, 0.5))
CONSTANT_RATE = (1.0,)
STEPS = len(HALVING.schedule) - 1
BATCHES: Mapping[str, BatchShape] = {"": WINDOW, "single": SINGLE}
# In other models, a weight or an output has two uses, and the rounding of the gradients' sum depends on their order.
CHAINS = ("chain", RANDOM_MODEL)
BLOCKS: Mapping[str, int] = {"first": 1, "last": 3}  # blocks of ``chain``, by the stage, of two, that holds them
HUGE = 2.0**127  # float32 cannot hold twice this number
OVERFLOW = BatchShape(WINDOW.micro_batches, factor=2**8)  # every non-zero gradient times HUGE overflows


def select_steps(mesh: Mesh) -> OptimizerSpec:
    """Return an optimizer with a falling rate; on tp, its steps keep weights integers, so split sums round nothing."""
    return SIGNS_HALVING if TENSOR in mesh.axes else HALVING


def fit_schedule(optimizer: OptimizerSpec, claims: Capabilities) -> OptimizerSpec:
    """Return the optimizer, at a constant rate if the engine has no learning-rate schedule."""
    has_schedule = claims.refusal(Feature.SCHEDULE) is None
    return optimizer if has_schedule else replace(optimizer, schedule=CONSTANT_RATE)


def observe_learning_rate(ctx: RankContext) -> None:
    """Make steps, each with its own batch, at a rate that a schedule halves; record each rank's rates and state.

    The variant sets the number of micro-batches of a batch.
    """
    engine = ctx.build_engine(optimizer=select_steps(ctx.config.mesh))
    ctx.record_training_state(engine, 0)
    for step in range(STEPS):
        run_batch(ctx, engine, step, BATCHES[ctx.variant])
        engine.step()
        engine.zero_grad()
        ctx.record("facts", collect_engine_facts(engine), step + 1)
        ctx.record_training_state(engine, step + 1)
    engine.close()


def judge_learning_rate(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare each step's losses with plain PyTorch's at the engine's weights, then the step, then all ranks' rates.

    Without tp, gradients are compared with plain PyTorch's only on chains. The step must be the result of the
    optimizer's formula at the scheduled rate, with the engine's own gradients.
    """
    optimizer, shape = select_steps(ctx.mesh), BATCHES[ctx.variant]
    for step in range(STEPS):
        weights = ctx.rank_records("params", step)[0]
        micros = compute_batch(ctx, step, weights, shape)
        require_exact_batch(ctx, step, weights, shape)
        yield from compare_micro_losses(ctx, micros, step)
        if splits_sums(ctx):
            numbers = range(step * MICRO_BATCHES, step * MICRO_BATCHES + shape.micro_batches)
            yield from compare_split_batches(ctx, "grads", step, SplitBatches(dict.fromkeys(numbers, 1.0), weights))
        elif ctx.baseline.spec.name in CHAINS:
            yield from ctx.compare_reduced_grads("grads", micros, step)
        yield from judge_step(ctx, optimizer, ctx.rank_records("grads", step)[0], RecordedStep(step))
        yield from compare_ranks_after_step(ctx, RecordedStep(step + 1))
        yield from compare_engine_facts(ctx, optimizer, step + 1, step + 1)


def overflow_in(model: nn.Module, number: int) -> nn.Module:
    """Make the gradient of the weight of block ``number`` alone infinite, and return the model.

    One input of the block is huge, and the weights that multiply it are 0, so no output and no other gradient depends
    on it. The gradient of these weights is the output's gradient times the input.
    """
    with torch.no_grad():
        model.get_parameter(f"blocks.{number - 1}.linear.bias")[0] = HUGE
        model.get_parameter(f"blocks.{number}.linear.weight")[:, 0] = 0
    return model


def observe_not_finite(ctx: RankContext) -> None:
    """Make a step in which a gradient of one stage alone is infinite or NaN."""
    clip = CLIP if ctx.variant.endswith(CLIPPED) else None
    model = overflow_in(ctx.spec.model(ctx.seed), BLOCKS[ctx.variant.removesuffix(CLIPPED)])
    engine = ctx.build_engine_around(model, optimizer=UNIT_LR_SGD, clip=clip)
    ctx.record_weights(engine, 0)
    run_batch(ctx, engine, 0, OVERFLOW)
    outcome = step_and_classify(engine)
    norm = engine.grad_norm() if clip is not None and outcome is Outcome.APPLIED else None
    ctx.record("outcome", {"outcome": scalar(outcome)} | ({} if norm is None else {"norm": scalar(norm)}))
    ctx.record_weights(engine, 1)
    engine.close()


def judge_not_finite(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check which gradients are finite, and compare outcomes and weights as ``mesh.not_finite`` does."""
    overflowed = f"blocks.{BLOCKS[ctx.variant.removesuffix(CLIPPED)]}.linear.weight"
    for rank, grads in enumerate(ctx.rank_records("grads")):
        for name, grad in grads.items():
            place = ctx.location(f"finiteness of {name}", Part.ACCUMULATION, 0, rank)
            is_finite = grad.isfinite().all().double()
            yield compare_bitwise(place, scalar(name != overflowed), is_finite)
    yield from judge_one_coordinate(ctx)


LAWS = (
    pipeline_law(
        "learning_rate",
        "each step uses the scheduled rate in all stages, and gives its batch's losses and, on chains, mean gradient",
        observe_learning_rate,
        judge_learning_rate,
        tuple(Variant(name) for name in BATCHES),
        Feature.SCHEDULE,
        models=(*MODELS, RANDOM_MODEL),
        kept_because="the only law of a pipeline whose learning rate changes, and of more than two batches",
    ),
    pipeline_law(
        "not_finite",
        "all stages apply, all skip or all refuse a gradient that is infinite or NaN in one stage alone",
        observe_not_finite,
        judge_not_finite,
        tuple(
            Variant(f"{stage}{suffix}", (Feature.CLIP,) if suffix else ())
            for stage in BLOCKS
            for suffix in ("", CLIPPED)
        ),
        models=("chain",),
        kept_because="the only law of a gradient that is not finite in only some stages",
    ),
)
