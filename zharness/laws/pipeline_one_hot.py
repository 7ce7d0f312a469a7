"""Define the law pipeline.one_hot: if one data coordinate alone has a non-zero loss, all gradients come from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import MeshSupport, Variant
from zharness.law_kit.optimizers import ZERO_LR_SGD
from zharness.law_kit.rank_context import RankContext
from zharness.laws.pipeline import (
    MICRO_BATCHES,
    MODELS,
    SINGLE,
    compare_micro_losses,
    compute_batch,
    multiply_result,
    pipeline_law,
    run_batch,
)
from zharness.parity import Comparison


def find_factor(coordinate: int, hot: int) -> float:
    """Return the factor on the loss of a data coordinate in the batch in which only ``hot`` has a loss."""
    return float(coordinate == hot)


def observe_one_hot(ctx: RankContext) -> None:
    """Run a batch for each data coordinate, in which all others multiply their loss by 0; steps move no weight.

    A batch has one micro-batch, because torch's pipelines around DDP crash after batches of several micro-batches.
    """
    engine = ctx.build_engine(optimizer=ZERO_LR_SGD)
    for hot in range(ctx.data_size):
        run_batch(ctx, engine, hot, replace(SINGLE, factor=find_factor(ctx.data_coordinate, hot)))
        engine.step()
        engine.zero_grad()
    engine.close()


def judge_one_hot(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare losses, and compare gradients with the one coordinate's gradient divided by the number of coordinates."""
    for hot in range(ctx.data_size):
        first = hot * MICRO_BATCHES
        micros = [
            [multiply_result(local, find_factor(at, hot)) for at, local in enumerate(row)]
            for row in compute_batch(ctx, hot, shape=SINGLE)
        ]
        yield from compare_micro_losses(ctx, micros, hot)
        exact = ctx.certify_exactness(range(first, first + SINGLE.micro_batches))
        yield from ctx.compare_reduced_grads("grads", micros, hot, exact)


_LAW = pipeline_law(
    "one_hot",
    "if only one data coordinate has a loss, all stages have its gradient, divided by the number of coordinates",
    observe_one_hot,
    judge_one_hot,
    (Variant(),),
    models=MODELS,
    kept_because="the only law of a pipeline in which data coordinates have losses of different weights",
)

LAWS = (replace(_LAW, mesh_support=MeshSupport.SEVERAL_COORDINATES),)
