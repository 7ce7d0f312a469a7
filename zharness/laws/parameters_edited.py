"""Define the law parameters.edited_and_stepped: forwards and steps after an edit use the edited weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zharness.engines.protocol import Engine, Feature, require_gathered
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, Variant
from zharness.law_kit.optimizer_step import (
    RecordedStep,
    compare_published_weights,
    compare_ranks_after_step,
    judge_step,
)
from zharness.law_kit.optimizers import ADAMW
from zharness.law_kit.rank_context import RankContext
from zharness.laws.access.common import new_values
from zharness.parity import Comparison, Part, Tier, compare_bitwise

BEFORE_STEP = "before_step"  # the edit is between backward and step
STEPS = 3
EDITED_STEP = 1


def observe_edited_and_stepped(ctx: RankContext) -> None:
    """Train steps, and edit every weight, frozen ones too, before the second forward or the second step."""
    engine = ctx.build_engine(optimizer=ADAMW)
    for step in range(STEPS):
        is_edited = step == EDITED_STEP
        if is_edited and ctx.variant != BEFORE_STEP:
            edit(ctx, engine)
        ctx.record("forward-params", engine.full_params(), step)
        engine.backward(ctx.loss(engine, step))
        if is_edited and ctx.variant == BEFORE_STEP:
            edit(ctx, engine)
        ctx.record_training_state(engine, find_time(step))
        ctx.record("grads", engine.full_grads(), step)
        engine.step()
        engine.zero_grad()
        ctx.record_training_state(engine, find_time(step) + 1)
    engine.close()


def find_time(step: int) -> int:
    """Return the number under which weights and state before ``step`` are recorded; the next is that after the step.

    An edit may come between the step before and this one.
    """
    return 2 * step


@torch.no_grad()
def edit(ctx: RankContext, engine: Engine) -> None:
    """Replace every weight on rank 0, and by other numbers on the other ranks. Record the new weights of rank 0.

    Every new weight differs from the old one: an engine may keep a master weight whose rounded value was not changed.
    """
    before = engine.full_params()
    values = new_values(before, ctx.seed)
    edited = {name: torch.where(value == before[name], 2 * value, value) for name, value in values.items()}
    ctx.record("edited", edited)
    with require_gathered(engine).gathered(list(edited)) as weights:
        for name, value in edited.items():
            weights[name].copy_(value if ctx.rank == 0 else torch.full_like(value, 7.0))


def judge_edited_and_stepped(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that weights and master weights are the edited ones, and judge every forward, gradient and step."""
    edited = ctx.rank_records("edited")[0]
    for step in range(STEPS):
        if step == EDITED_STEP:
            for label in ("params", "masters"):
                for rank, record in enumerate(ctx.rank_records(label, find_time(step))):
                    for name, weight in record.items():
                        place = ctx.location(name, Part.GATHER, step, rank)
                        yield compare_bitwise(place, edited[name].to(weight.dtype), weight)
        local = ctx.compute_local_grads(step, ctx.rank_records("forward-params", step)[0])
        yield from ctx.compare_losses(step, local)
        yield from ctx.compare_reduced_grads("grads", [local], step)
        before = RecordedStep(find_time(step), "masters", skipped_steps=find_time(step) - step)
        yield from judge_step(ctx, ADAMW, ctx.rank_records("grads", step)[0], before)
        after = RecordedStep(find_time(step) + 1, "masters")
        yield from compare_ranks_after_step(ctx, after)
        yield from compare_published_weights(ctx, after, "params")


LAWS = (
    Law(
        name="parameters.edited_and_stepped",
        statement="forwards and steps after an edit of full weights use the edited weights, in every dtype",
        tier=Tier.STAGED,
        models=("similar",),
        observe=observe_edited_and_stepped,
        judge=judge_edited_and_stepped,
        features=(Feature.PARAMETERS, Feature.EDITS, Feature.PARAM_GROUPS, Feature.SCHEDULE),
        weights_stay_integers=False,
        variants=(Variant(), Variant(BEFORE_STEP)),
        kept_because="the only edits that a step of the optimizer follows, and the only ones of master weights",
    ),
)
