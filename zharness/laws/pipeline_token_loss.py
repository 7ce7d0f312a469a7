"""Define the law pipeline.token_loss: a batch's loss is the sum over all its counted tokens divided by their number."""

from __future__ import annotations

from collections.abc import Iterator

from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Variant
from zharness.law_kit.optimizers import ZERO_LR_SGD
from zharness.law_kit.rank_context import RankContext
from zharness.laws.mesh_token_loss import TokenLoss, certify_mean
from zharness.laws.pipeline import (
    MICRO_BATCHES,
    SCHEDULES,
    compare_micro_losses,
    pipeline_law,
    select_schedule,
    train_micro_batches,
)
from zharness.parity import Comparison
from zharness.parity.certificate import division_exactness


def build_loss(data_size: int) -> TokenLoss:
    """Return the loss for an engine that averages over micro-batches and ``data_size`` coordinates."""
    return TokenLoss(data_size, MICRO_BATCHES, terms=data_size * MICRO_BATCHES)


def observe_token_loss(ctx: RankContext) -> None:
    """Run one batch of micro-batches with unequal padding, and record their losses and the full gradients."""
    engine = ctx.build_engine(optimizer=ZERO_LR_SGD, options=select_schedule(ctx.variant))
    compute_loss = build_loss(ctx.data_size)
    batches = [compute_loss.pad(ctx.batch(micro), ctx.data_coordinate, micro) for micro in range(MICRO_BATCHES)]
    ctx.record("losses", train_micro_batches(engine, batches, compute_loss))
    ctx.record("grads", engine.full_grads())
    engine.close()


def judge_token_loss(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare losses and gradients bitwise with plain PyTorch's sum over all tokens, divided once by their number."""
    loss = build_loss(ctx.data_size)
    micros = [loss.run_plain(ctx.baseline, micro) for micro in range(MICRO_BATCHES)]
    yield from compare_micro_losses(ctx, micros)
    # DDP may reduce the first batch twice (FINDINGS.md), and the mean of three equal means is rounded.
    exact = division_exactness(loss.terms) and certify_mean(ctx, loss)
    yield from ctx.compare_reduced_grads("grads", micros, exact=exact)


LAWS = (
    pipeline_law(
        "token_loss",
        "with unequal padding, a batch's loss is the sum over all its tokens on all ranks, divided by their number",
        observe_token_loss,
        judge_token_loss,
        tuple(Variant(name, schedules=(name,), micro_batches=MICRO_BATCHES) for name in SCHEDULES),
        models=("token_chain",),
        kept_because="the only law of a pipeline whose micro-batches have losses of different weights",
    ),
)
