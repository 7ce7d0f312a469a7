"""Train one accumulation window on a rank, and judge the gradients that the engine computes for the window."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor

from zharness.engines.protocol import AccumulationOwner, Engine
from zharness.law_kit.judge_context import JudgeContext, stop_at_first_mismatch
from zharness.law_kit.rank_context import RankContext
from zharness.parity import Comparison
from zharness.parity.baseline import LocalResult
from zharness.parity.certificate import Exactness


def accumulate(
    ctx: RankContext,
    engine: Engine,
    owner: AccumulationOwner,
    window: range,
    label: str,
    backward: Callable[[Tensor], object],
) -> None:
    """Run forward and ``backward`` for every micro-batch of ``window``, but not the optimizer step at the boundary.

    The losses are recorded under ``label``. If the caller owns the accumulation, this function divides each loss by the
    number of micro-batches. If the engine owns the accumulation, this function calls ``engine.step()`` after each
    micro-batch except the last.
    """
    for micro in window:
        loss = ctx.loss(engine, micro, label)
        backward(loss if owner is AccumulationOwner.ENGINE else loss / len(window))
        if owner is AccumulationOwner.ENGINE and micro != window[-1]:
            engine.step()


def judge_engine_divided_gradients(
    ctx: JudgeContext,
    label: str,
    step: int,
    window: range,
    params: Mapping[str, Tensor],
    divided_locals: Sequence[Sequence[LocalResult]],
    exact: bool | Exactness = False,
) -> Iterator[Comparison]:
    """Compare the gradients of a window in which the engine divides either each loss or the gradient.

    ``divided_locals`` are the local gradients that plain PyTorch computes from divided losses. If some gradient differs
    from these, the gradients are also compared with those of undivided losses, which are divided afterwards. If some
    gradient differs from both, this function yields the comparisons of the way that more gradients match, because a
    wrong engine is usually right in most gradients.
    """
    by_loss = partial(ctx.compare_reduced_grads, label, divided_locals, step, exact, scale=len(window))
    comparisons = list(stop_at_first_mismatch(by_loss(explain=False)))
    if count_matches(comparisons) == len(comparisons):
        yield from comparisons
        return
    by_gradient = partial(
        ctx.compare_reduced_grads, label, [ctx.compute_local_grads(micro, params) for micro in window], step, exact
    )
    comparisons = list(stop_at_first_mismatch(by_gradient(explain=False)))
    if count_matches(comparisons) < len(comparisons):
        comparisons = max(list(by_gradient()), list(by_loss()), key=count_matches)
    yield from comparisons


def count_matches(comparisons: Sequence[Comparison]) -> int:
    """Return the number of comparisons that have no mismatch."""
    return sum(comparison.mismatch is None for comparison in comparisons)


def select_accumulation_owner(ctx: RankContext) -> AccumulationOwner:
    """Return the owner of the accumulation in the configured training.

    The owner is the engine if the engine claims that it can accumulate, and otherwise the code that calls the engine.
    """
    engine_owns = AccumulationOwner.ENGINE in ctx.accumulation_owners()
    return AccumulationOwner.ENGINE if engine_owns else AccumulationOwner.CALLER


def build_configured_engine(ctx: RankContext) -> Engine:
    """Build an engine around the model with the optimizer, clipping and accumulation that the user configured."""
    training = ctx.training
    return ctx.build_engine(
        optimizer=training.optimizer,
        clip=training.clip,
        accumulation_steps=training.accumulation,
        accumulation_owner=select_accumulation_owner(ctx),
    )
