"""Accumulation windows: how a rank trains one, and how its gradients are judged."""

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
    """Forward and ``backward`` of every micro-step of ``window``, up to the boundary but not over it."""
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
    """Gradients of the micro-steps ``window`` where the engine divides: the loss, as ``divided`` is, or the gradient.

    The undivided ones are computed only where the others do not fit. Where neither do, it is told of those with which
    more agrees: an engine that is wrong in one place is right in others.
    """
    by_loss = partial(ctx.compare_reduced_grads, label, divided_locals, step, exact, scale=len(window))
    found = list(stop_at_first_mismatch(by_loss(explain=False)))
    if count_matches(found) == len(found):
        yield from found
        return
    by_gradient = partial(
        ctx.compare_reduced_grads, label, [ctx.compute_local_grads(micro, params) for micro in window], step, exact
    )
    found = list(stop_at_first_mismatch(by_gradient(explain=False)))
    if count_matches(found) < len(found):
        found = max(list(by_gradient()), list(by_loss()), key=count_matches)
    yield from found


def count_matches(comparisons: Sequence[Comparison]) -> int:
    """In how many comparisons nothing is wrong."""
    return sum(comparison.mismatch is None for comparison in comparisons)


def select_accumulation_owner(ctx: RankContext) -> AccumulationOwner:
    """Who owns the accumulation of a training as configured: the engine, where it can."""
    engine = AccumulationOwner.ENGINE in ctx.accumulation_owners()
    return AccumulationOwner.ENGINE if engine else AccumulationOwner.CALLER
