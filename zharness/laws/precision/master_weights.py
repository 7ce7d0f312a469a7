"""Define the law precision.master_weights.

The optimizer has to update master weights, the weights of the model have to equal the rounded master weights, and
gradients have to accumulate in the configured dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from zharness.engines.protocol import Feature
from zharness.errors import UsageError
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Variant
from zharness.law_kit.optimizer_step import (
    RecordedStep,
    compare_published_weights,
    compare_ranks_after_step,
    judge_step,
)
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.laws.precision.common import LOW_DTYPE, WIDE_DTYPE, dtype_index, precision_law
from zharness.laws.precision.grad_scaler import ADAMW
from zharness.parity import Comparison, Part, compare_bitwise
from zharness.parity.baseline import LossWeighting
from zharness.parity.certificate import division_exactness

BF16_OPTIONS: Mapping[str, Any] = {"enabled": True}

LOW_MASTERS_OPTIONS = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}

INVALID_OPTIONS: Sequence[Mapping[str, Any]] = (
    {"bf16": {**BF16_OPTIONS, "bf16_optimizer_states": True}},
    {"bf16": {**BF16_OPTIONS, "bf16_master_weights_and_grads": True}},
    {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
    {"bf16": {**BF16_OPTIONS, **LOW_MASTERS_OPTIONS}, "fp16": {"fp16_master_weights_and_grads": True}},
    {"bf16": BF16_OPTIONS, "fp16": {"enabled": True}},
)


def observe_masters(ctx: RankContext) -> None:
    """Count the invalid configurations that the engine accepts, then train two steps with master weights."""
    low = ctx.variant == "low"
    options = {"bf16": {**BF16_OPTIONS, **(LOW_MASTERS_OPTIONS if low else {})}}
    wrong = [*INVALID_OPTIONS, options] if low and ctx.config.stage == 0 else INVALID_OPTIONS
    accepted = sum(not is_config_refused(ctx, invalid) for invalid in wrong)
    ctx.record("accepted", {"invalid": scalar(accepted)})
    if len(wrong) > len(INVALID_OPTIONS):
        return
    engine, batch = ctx.build_engine(optimizer=ADAMW, options=options), ctx.batch(0).to(LOW_DTYPE)
    for step in range(2):
        ctx.record_training_state(engine, step)
        engine.backward(ctx.spec.loss(engine(batch.inputs), batch.target))
        ctx.record("grads", engine.full_grads(), step)
        engine.step()
        engine.zero_grad()
    ctx.record_training_state(engine, 2)
    engine.close()
    if not low and not accepted:  # an accepted invalid configuration already fails the law
        observe_fp32_accumulation(ctx)


def judge_masters(ctx: JudgeContext) -> Iterator[Comparison]:
    """Judge the steps in the dtype of the master weights.

    Weights have to equal rounded master weights, and gradients have to equal those of plain PyTorch in bf16.
    """
    for rank, record in enumerate(ctx.rank_records("accepted")):
        yield compare_bitwise(ctx.location("input", Part.FORWARD, rank=rank), scalar(0), record["invalid"])
    if not ctx.has_record("grads"):
        return
    master = LOW_DTYPE if ctx.variant == "low" else WIDE_DTYPE
    low_ctx = replace(ctx, baseline=replace(ctx.baseline, dtype=LOW_DTYPE), dtype=LOW_DTYPE)
    yield from low_ctx.compare_reduced_grads("grads", [low_ctx.compute_local_grads(0)])
    yield from judge_fp32_accumulation(ctx)
    for step in range(2):
        weights, grads = ctx.rank_records("masters", step)[0], ctx.rank_records("grads", step)[0]
        state = ctx.rank_records("state", step + 1)[0]
        for name, tensor in [(name, weights[name]) for name in grads] + list(grads.items()):
            yield compare_bitwise(
                ctx.location(name, Part.OPTIMIZER, step),
                dtype_index(torch.zeros((), dtype=master)),
                dtype_index(tensor),
            )
        for name, tensor in state.items():
            if tensor.dim():
                yield compare_bitwise(
                    ctx.location(name, Part.OPTIMIZER, step),
                    dtype_index(torch.zeros((), dtype=master)),
                    dtype_index(tensor),
                )
        yield from judge_step(ctx, ADAMW, grads, RecordedStep(step, "masters"))
        yield from compare_ranks_after_step(ctx, RecordedStep(step + 1, "masters"))
        yield from compare_published_weights(ctx, RecordedStep(step + 1, "masters"), "params")


FP32_GRAD_ACCUM_OPTIONS: Mapping[str, Any] = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}

# 256 + 1 times a bf16 gradient needs nine more bits than the gradient: fp32 has these bits, and bf16 does not.
LOSS_FACTORS = (256.0, 1.0)


def is_config_refused(ctx: RankContext, options: Mapping[str, Any]) -> bool:
    """Return whether the engine raises UsageError for these options."""
    try:
        ctx.build_engine(options=options).close()
    except UsageError:
        return True
    return False


def weigh_rank_0_loss(factor: float) -> LossWeighting:
    """Return a function that multiplies rank 0's loss by ``factor`` and all others by 0, so that sums are exact."""
    return lambda loss, rank: loss * (factor * (rank == 0))


def observe_fp32_accumulation(ctx: RankContext) -> None:
    """Run two backwards on bf16 weights whose gradients accumulate in fp32, and record the gradients.

    Nothing is recorded if the engine refuses the option: such an engine may accumulate in the dtype of the weights, as
    plain PyTorch does.
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
        engine.backward(
            weigh_rank_0_loss(factor)(ctx.spec.loss(engine(batch.inputs), batch.target), ctx.data_coordinate)
        )
    ctx.record("added", engine.full_grads())
    engine.close()


def judge_fp32_accumulation(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the accumulated gradients bitwise with those computed in float64.

    At world sizes that are not powers of two, compare them within the rounding error bound of the reduction.
    """
    if ctx.has_record("added"):
        low_ctx = replace(ctx, baseline=replace(ctx.baseline, dtype=LOW_DTYPE), dtype=LOW_DTYPE)
        shares = [low_ctx.compute_local_grads(0, weigh=weigh_rank_0_loss(factor)) for factor in LOSS_FACTORS]
        yield from low_ctx.compare_reduced_grads(
            "added", shares, exact=division_exactness(ctx.data_size), scale=len(LOSS_FACTORS)
        )


LAWS = (
    precision_law(
        "master_weights",
        "the optimizer updates masters, weights equal rounded masters, gradients accumulate in the configured dtype",
        observe_masters,
        judge_masters,
        features=(Feature.MASTERS,),
        variants=(Variant("fp32"), Variant("low")),
        kept_because="the only law that configures the dtypes of masters, gradients and optimizer state",
        weights_stay_integers=True,  # only the first gradients are compared; steps are judged from the engine's
    ),
)
