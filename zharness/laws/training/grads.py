"""Define the laws training.grads and training.one_hot_rank: a backward gives the mean of the ranks' gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, ModelScope, Variant
from zharness.law_kit.law_steps import LawSteps
from zharness.law_kit.optimizers import ZERO_LR_SGD
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.setting import SettingSupport
from zharness.laws.training.common import ALL_MODELS
from zharness.parity import Comparison, Tier
from zharness.parity.baseline import LossWeighting
from zharness.parity.certificate import single_term_mean_exactness


def observe_grads(ctx: RankContext) -> None:
    """Run one backward, and record the loss and the gradients."""
    engine = ctx.build_engine()
    ctx.train(engine, step=0)
    ctx.record("grads", engine.full_grads())
    engine.close()


def judge_grads(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the losses with those of plain PyTorch, and the gradients with the mean over ranks."""
    local = ctx.compute_local_grads(step=0)
    yield from ctx.compare_losses(0, local)
    yield from ctx.compare_reduced_grads("grads", [local], exact=ctx.certify_exactness(range(1)))


def observe_one_hot_rank(ctx: RankContext) -> None:
    """Run one backward for each rank, in which all other ranks multiply their loss by zero."""
    engine = ctx.build_engine(optimizer=ZERO_LR_SGD)
    for rank_with_loss in range(ctx.data_size):
        loss = ctx.loss(engine, rank_with_loss)
        ctx.backward(engine, loss, rank_with_loss, factor=float(ctx.data_coordinate == rank_with_loss))
        ctx.record("grads", engine.full_grads(), step=rank_with_loss)
        engine.step()
        engine.zero_grad()
    engine.close()


def judge_one_hot_rank(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that the gradients are bitwise equal to those of one rank, because all other ranks' gradients are zero."""
    for chosen in range(ctx.data_size):
        local = ctx.compute_local_grads(chosen, weigh=weigh_one_rank(chosen))
        yield from ctx.compare_losses(chosen, local)
        narrow = max(ctx.dtype, ctx.reduce_dtype, key=lambda dtype: torch.finfo(dtype).eps)
        # In a window, an engine may add the gradient to the mean over earlier micro-batches, which every rank then has.
        # Through a SyncBatchNorm, the loss of one rank reaches the gradients of other ranks.
        has_single_term = ctx.setting.accumulation_steps == 1 and not ctx.baseline.joins_ranks
        exact = has_single_term and single_term_mean_exactness(
            local[chosen], ctx.data_size, narrow, ctx.baseline.loss_scale
        )
        yield from ctx.compare_reduced_grads("grads", [local], step=chosen, exact=exact)


def weigh_one_rank(rank_with_loss: int) -> LossWeighting:
    """Return a function that multiplies the loss of every rank except ``rank_with_loss`` by zero."""
    return lambda loss, rank: loss * float(rank == rank_with_loss)


LAWS = (
    Law(
        name="training.grads",
        statement="every full gradient after backward is the mean of the ranks' gradients, and equal on all ranks",
        tier=Tier.STAGED,
        models=ALL_MODELS,
        observe=observe_grads,
        judge=judge_grads,
        variants=(Variant(model_scope=ModelScope.ANY),),
        steps=LawSteps(observe_grads),
        is_gradient_law=True,
        setting_support=SettingSupport.WINDOWS_AND_CALLS,
        kept_because="the shortest law, which applies to every engine: read it first in a report",
    ),
    Law(
        name="training.one_hot_rank",
        statement="if only rank k has a non-zero loss, N x gradient is the plain gradient of rank k's batch, bitwise",
        tier=Tier.EXACT,
        models=ALL_MODELS,
        observe=observe_one_hot_rank,
        judge=judge_one_hot_rank,
        variants=(Variant(model_scope=ModelScope.ANY),),
        steps=LawSteps(observe_one_hot_rank),
        compares_later_forwards=True,
        setting_support=SettingSupport.WINDOWS_AND_CALLS,
        kept_because="bitwise on random weights, where other laws bound a mean, and names the rank that is missing",
    ),
)
