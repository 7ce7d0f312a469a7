"""Define laws of the reduction: gradients are summed or averaged over ranks, and no_sync postpones this reduction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from zharness.engines.protocol import Feature, Reduction
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law_steps import LawSteps
from zharness.law_kit.optimizers import ZERO_LR_SGD
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.setting import SettingSupport
from zharness.laws.training.common import variation_law
from zharness.parity import Comparison


def observe_sum_or_mean(ctx: RankContext) -> None:
    """Run one backward with each reduction, sum and mean, and record the loss and the gradients."""
    for reduction in Reduction:
        engine = ctx.build_engine(reduction=reduction)
        ctx.train(engine, 0, f"loss-{reduction.value}")
        ctx.record(f"grads-{reduction.value}", engine.full_grads())
        engine.close()


def judge_sum_or_mean(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that the mean reduction gives the mean of the ranks' gradients, and the sum reduction their sum."""
    local, exact = ctx.compute_local_grads(), ctx.certify_exactness(range(1))
    yield from ctx.compare_reduced_grads("grads-mean", [local], exact=exact)
    yield from ctx.compare_reduced_grads("grads-sum", [local], exact=exact, scale=ctx.data_size)


WINDOWS = (range(4), range(4, 8))

ABANDONED_STEPS = range(8, 10)

FINAL_WINDOW = range(10, 11)

DISCARDED_HINT = "the sum with the gradients that zero_grad() discarded"


def observe_no_sync(ctx: RankContext) -> None:
    """Train two accumulation windows with no_sync blocks, discard two windows, raise in a block, and train one more.

    If the discarded windows or the exception leave gradients in the engine, the last gradients are wrong.
    """
    engine = ctx.build_engine(optimizer=ZERO_LR_SGD)
    for at, (first, second, third, last) in enumerate(WINDOWS):
        for block in ((first,), (second, third)):
            with engine.no_sync():
                for step in block:
                    engine.backward(ctx.loss(engine, step) / 4)
        engine.backward(ctx.loss(engine, last) / 4)
        ctx.record("grads", engine.full_grads(), at)
        engine.step()
        engine.zero_grad()
    for step in ABANDONED_STEPS:
        with engine.no_sync():
            engine.backward(ctx.loss(engine, step))
        engine.zero_grad()
    with suppress(InterruptedError), engine.no_sync():
        raise InterruptedError
    engine.backward(ctx.loss(engine, FINAL_WINDOW.start))
    ctx.record("grads", engine.full_grads(), len(WINDOWS))
    engine.step()  # raises if the exception left the engine inside no_sync
    engine.close()


def judge_no_sync(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the gradients of each accumulation window with the mean over all micro-batches and ranks."""
    discarded = [ctx.compute_local_grads(step) for step in ABANDONED_STEPS]
    for at, steps in enumerate((*WINDOWS, FINAL_WINDOW)):
        micros = [ctx.compute_local_grads(step) for step in steps]
        suspects = {DISCARDED_HINT: [*discarded, *micros]} if steps == FINAL_WINDOW else None
        yield from ctx.compare_reduced_grads("grads", micros, at, ctx.certify_exactness(steps), suspects=suspects)


LAWS = (
    variation_law(
        "sum_or_mean",
        "the reduction over ranks takes the mean or the sum of gradients, as configured",
        observe_sum_or_mean,
        judge_sum_or_mean,
        models=("mlp", "exact", "transformer"),
        features=(Feature.SUM,),
        steps=LawSteps(observe_sum_or_mean),
        setting_support=SettingSupport.WINDOWS_AND_CALLS,
        kept_because="the only law that trains with both reductions",
    ),
    variation_law(
        "no_sync",
        "gradients of backwards inside no_sync add to those of the next backward outside; zero_grad discards them",
        observe_no_sync,
        judge_no_sync,
        models=("mlp", "exact"),
        features=(Feature.NO_SYNC,),
        steps=LawSteps(observe_no_sync),
        kept_because="the only law that postpones the reduction",
    ),
)
