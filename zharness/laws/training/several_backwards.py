"""Define the law training.several_backwards: the gradients of all backwards before a step add up.

Some law variants run backward of several losses in each micro-batch. Others discard accumulation windows in which the
engine counts micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zharness.engines.protocol import AccumulationOwner, Feature, Reduction
from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Variant
from zharness.law_kit.law_steps import LawSteps
from zharness.law_kit.optimizers import ZERO_LR_SGD
from zharness.law_kit.program_suspects import (
    make_added_again_suspects,
    make_reduced_again_suspects,
    scale_local_grads,
)
from zharness.law_kit.rank_actions import second_loss
from zharness.law_kit.rank_context import RankContext
from zharness.laws.training.common import variation_law
from zharness.parity import Comparison, Part, compare_bitwise
from zharness.workload import Batch

WINDOW, SAME_LOSS, ABANDONED = "window", "same_loss", "given_up"
REDUCING_BACKWARD = 2  # the window's first backward of its last micro-batch, in which the engine reduces
LAST_ALONE_HINT = "the gradient of the last backward alone"
ABANDONED_WINDOWS = (
    (0, 1, 2),
    (3, 4, 5),
)  # the only micro-batch of an abandoned window, then both of a full window


def observe_several_backwards(ctx: RankContext) -> None:
    """Run two forwards and three backwards of three losses before one step, or the calls of another law variant."""
    if ctx.variant:
        (observe_abandoned_windows if ctx.variant == ABANDONED else observe_window)(ctx)
        return
    engine = ctx.build_engine(optimizer=ZERO_LR_SGD)
    for step in range(2):
        batch = ctx.batch(step)
        output = engine(batch.inputs)
        engine.backward(ctx.spec.loss(output, batch.target), retain_graph=step == 1)
    engine.backward(second_loss(output))
    ctx.record("grads", engine.full_grads())
    engine.step()
    engine.zero_grad()
    engine.backward(ctx.loss(engine, 2))
    ctx.record("grads", engine.full_grads(), 1)
    engine.close()


def observe_window(ctx: RankContext) -> None:
    """Run backward of two losses, or twice of one loss, in each micro-batch of the engine's accumulation window."""
    owner = AccumulationOwner.ENGINE
    engine = ctx.build_engine(
        optimizer=ZERO_LR_SGD, accumulation_steps=2, accumulation_owner=owner, reduction=Reduction.MEAN
    )
    for step in range(2):
        batch = ctx.batch(step)
        output = engine(batch.inputs)
        loss = ctx.spec.loss(output, batch.target)
        engine.backward(loss, retain_graph=True)
        engine.backward(loss if ctx.variant == SAME_LOSS else second_loss(output))
        if step == 1:
            ctx.record("grads", engine.full_grads())
        engine.step()
        ctx.record_optimizer_state("state", engine, step)
    engine.close()


def observe_abandoned_windows(ctx: RankContext) -> None:
    """Discard an accumulation window after its first micro-batch, train a full window, and do both again."""
    owner = AccumulationOwner.ENGINE
    engine = ctx.build_engine(
        optimizer=ZERO_LR_SGD, accumulation_steps=2, accumulation_owner=owner, reduction=Reduction.MEAN
    )
    for at, (abandoned, first, last) in enumerate(ABANDONED_WINDOWS):
        engine.backward(ctx.loss(engine, abandoned))
        engine.step()
        engine.zero_grad()
        engine.backward(ctx.loss(engine, first))
        engine.step()
        ctx.record_optimizer_state("state", engine, at)
        engine.backward(ctx.loss(engine, last))
        ctx.record("grads", engine.full_grads(), at)
        engine.step()
    engine.close()


def judge_no_step_made(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that the optimizer state recorded within an accumulation window is zero, because no step was made yet."""
    for rank, record in enumerate(ctx.rank_records("state")):
        for name, tensor in record.items():
            comparison = compare_bitwise(ctx.location(name, Part.OPTIMIZER, 0, rank), torch.zeros_like(tensor), tensor)
            yield add_hint(comparison, "a step was made before the window was full")


def judge_abandoned_windows(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that the gradients of an accumulation window contain no gradient of a discarded window."""
    yield from judge_no_step_made(ctx)
    for at, (_, *steps) in enumerate(ABANDONED_WINDOWS):
        micros = [ctx.compute_local_grads(step) for step in steps]
        yield from ctx.compare_reduced_grads("grads", micros, at, ctx.certify_exactness(range(steps[0], steps[-1] + 1)))


def judge_window(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check the gradients of an accumulation window, and that no step was made before its second micro-batch."""
    yield from judge_no_step_made(ctx)
    second = None if ctx.variant == SAME_LOSS else second_objective
    losses = [ctx.compute_local_grads(step, objective=of) for step in range(2) for of in (None, second)]
    suspects = {LAST_ALONE_HINT: scale_local_grads(losses[-1:], 1 / 2)}
    suspects |= make_added_again_suspects((0, 0, 1, 1), losses, 1 / 2)
    suspects |= make_reduced_again_suspects(ctx.mesh, losses, REDUCING_BACKWARD, 1 / 2)
    yield from ctx.compare_reduced_grads(
        "grads",
        losses,
        exact=ctx.certify_exactness(range(2)) and (second is None or ctx.certify_exactness(range(2), second)),
        scale=2,
        suspects=suspects,
    )


def second_objective(output: Tensor, _batch: Batch) -> Tensor:
    """Return the second loss, which does not use the batch."""
    return second_loss(output)


def judge_several_backwards(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the gradients before the step with the sum over all losses, and check the next backward's gradients too.

    Another law variant is judged by its own function.
    """
    if ctx.variant:
        yield from (judge_abandoned_windows if ctx.variant == ABANDONED else judge_window)(ctx)
        return
    losses = [
        ctx.compute_local_grads(0),
        ctx.compute_local_grads(1),
        ctx.compute_local_grads(1, objective=second_objective),
    ]
    exact = ctx.certify_exactness(range(2)) and ctx.certify_exactness(range(1, 2), second_objective)
    suspects = make_added_again_suspects((0, 1, 1), losses, 1.0)
    suspects |= make_reduced_again_suspects(ctx.mesh, losses, 0, 1.0)
    yield from ctx.compare_reduced_grads("grads", losses, exact=exact, scale=len(losses), suspects=suspects)
    yield from ctx.compare_reduced_grads("grads", [ctx.compute_local_grads(2)], 1, ctx.certify_exactness(range(2, 3)))


LAWS = (
    variation_law(
        "several_backwards",
        "the gradients of several backwards before one step add up, also if accumulation_steps is 1",
        observe_several_backwards,
        judge_several_backwards,
        features=(Feature.RETAIN_GRAPH,),
        variants=(
            Variant(),
            *(Variant(name, (Feature.ENGINE_ACCUMULATION,)) for name in (WINDOW, SAME_LOSS, ABANDONED)),
        ),
        steps=LawSteps(observe_several_backwards),
        kept_because="the only accumulation that is not configured: several backwards without a step between them",
    ),
)
