"""A part of the law of masters: gradients of several backwards, reduced one by one, add up in the dtype asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from zharness.engines.protocol import Feature
from zharness.errors import UsageError
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.rank_context import RankContext
from zharness.laws.precision_autocast import LOW_DTYPE
from zharness.parity import Comparison
from zharness.parity.baseline import LossWeighting
from zharness.parity.certificate import division_exactness

FP32_GRAD_ACCUM_OPTIONS: Mapping[str, Any] = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
# Each share is a number of bf16, and 257 shares together need nine bits more than one: fp32 has them, bf16 has not.
LOSS_FACTORS = (256.0, 1.0)


def is_config_refused(ctx: RankContext, options: Mapping[str, Any]) -> bool:
    """Whether an engine of these options is refused."""
    try:
        ctx.build_engine(options=options).close()
    except UsageError:
        return True
    return False


def weigh_rank_0_loss(factor: float) -> LossWeighting:
    """So many times the loss of rank 0, and nothing of every other's: no reduction over ranks then rounds."""
    return lambda loss, rank: loss * (factor * (rank == 0))


def observe_fp32_accumulation(ctx: RankContext) -> None:
    """Two backwards on bf16 weights; nothing where the engine refuses to add their gradients up in fp32.

    Plain PyTorch adds up in the dtype of the weights, and an engine may: it is held to fp32 where it takes that key.
    """
    if ctx.capabilities.refusal(Feature.CALLER_ACCUMULATION) is not None or is_config_refused(
        ctx, FP32_GRAD_ACCUM_OPTIONS
    ):
        return
    engine, batch = (
        ctx.build_engine(accumulation_steps=len(LOSS_FACTORS), options=FP32_GRAD_ACCUM_OPTIONS),
        ctx.batch(0).to(LOW_DTYPE),
    )
    for factor in LOSS_FACTORS:
        engine.backward(weigh_rank_0_loss(factor)(ctx.spec.loss(engine(batch.inputs), batch.target), ctx.rank))
    ctx.record("added", engine.full_grads())
    engine.close()


def judge_fp32_accumulation(ctx: JudgeContext) -> Iterator[Comparison]:
    """The sum is bitwise that of float64, on any model: at three ranks within the bound of the reduction."""
    if ctx.has_record("added"):
        half = replace(ctx, baseline=replace(ctx.baseline, dtype=LOW_DTYPE), dtype=LOW_DTYPE)
        shares = [half.compute_local_grads(0, weigh=weigh_rank_0_loss(factor)) for factor in LOSS_FACTORS]
        yield from half.compare_reduced_grads(
            "added", shares, exact=division_exactness(ctx.world_size), scale=len(LOSS_FACTORS)
        )
