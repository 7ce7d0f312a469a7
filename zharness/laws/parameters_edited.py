"""Define laws of edited weights: forwards and steps after an edit use the edited weights.

Weights are edited as full tensors inside ``gathered()``, or in place, as the module's own parameters.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zharness.engines.protocol import Engine, Feature, GroupSpec, OptimizerSpec, require_gathered
from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, Variant
from zharness.law_kit.optimizer_step import (
    RecordedStep,
    compare_published_weights,
    compare_ranks_after_step,
    judge_step,
)
from zharness.law_kit.optimizers import ADAMW
from zharness.law_kit.rank_actions import eval_mode
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.laws.access.common import new_values
from zharness.mesh import CONTEXT, TENSOR, Mesh
from zharness.parity import Comparison, Part, Tier, compare_bitwise, compare_ranks

BEFORE_STEP = "before_step"  # the edit is between backward and step
PARTLY = "partly"  # every weight is gathered, and every second weight is edited
EVALUATED = "evaluated"  # forwards in evaluation mode come before and after the edit
STEPS = 3
EDITED_STEP = 1
UNEDITED_HINT = "nobody edited it"
UNCHANGED_HINT = "it is the weight from before the edit"
OLD_MASTER_HINT = "the edit did not reach the master weight"


def observe_edited_and_stepped(ctx: RankContext) -> None:
    """Train steps, and edit trained and frozen weights before the second forward or the second step."""
    engine = ctx.build_engine(optimizer=ADAMW)
    for step in range(STEPS):
        is_edited = step == EDITED_STEP
        if ctx.variant == EVALUATED:
            evaluate(ctx, engine, step)
        if is_edited and ctx.variant != BEFORE_STEP:
            edit(ctx, engine)
        ctx.record("forward-params", engine.full_params(), step)
        if is_edited and ctx.variant == EVALUATED:
            evaluate(ctx, engine, STEPS)
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
    """Return the number under which weights and state before ``step`` are recorded.

    The state after the step has the next number. An edit may come between two steps.
    """
    return 2 * step


def evaluate(ctx: RankContext, engine: Engine, time: int) -> None:
    """Run a forward in evaluation mode without gradients, and record its loss."""
    with eval_mode(engine), torch.no_grad():
        ctx.loss(engine, time, "evaluated")


@torch.no_grad()
def edit(ctx: RankContext, engine: Engine) -> None:
    """Replace weights, on the other ranks by other values than on rank 0. Record the new weights of rank 0.

    Every element changes, because an engine may keep a master weight whose rounded value did not change.
    """
    before = engine.full_params()
    values = new_values(before, ctx.seed)
    edited = {name: torch.where(value == before[name], 2 * value, value) for name, value in values.items()}
    edited = {name: edited[name] for name in (list(edited)[::2] if ctx.variant == PARTLY else edited)}
    ctx.record("edited", edited)
    with require_gathered(engine).gathered(list(before)) as weights:
        for name, value in edited.items():
            weights[name].copy_(value if ctx.rank == 0 else torch.full_like(value, 7.0))


def judge_edited_and_stepped(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that weights and masters are the edited ones, and judge every forward, gradient and step."""
    for step in range(STEPS):
        if step == EDITED_STEP:
            yield from judge_edit(ctx)
        if ctx.variant == EVALUATED:
            yield from judge_evaluations(ctx, step)
        local = ctx.compute_local_grads(step, ctx.rank_records("forward-params", step)[0])
        yield from ctx.compare_losses(step, local)
        yield from ctx.compare_reduced_grads("grads", [local], step)
        before = RecordedStep(find_time(step), "masters", skipped_steps=find_time(step) - step)
        yield from judge_step(ctx, ADAMW, ctx.rank_records("grads", step)[0], before)
        after = RecordedStep(find_time(step) + 1, "masters")
        yield from compare_ranks_after_step(ctx, after)
        yield from compare_published_weights(ctx, after, "params")


def judge_edit(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare edited weights and masters with the new values, and all others with their values before the edit."""
    edited, time = ctx.rank_records("edited")[0], find_time(EDITED_STEP)
    for label in ("params", "masters"):
        for rank, (before, after) in enumerate(
            zip(ctx.rank_records(label, time - 1), ctx.rank_records(label, time), strict=True)
        ):
            for name, weight in after.items():
                place = ctx.location(name, Part.GATHER, EDITED_STEP, rank)
                comparison = compare_bitwise(place, edited.get(name, before[name]).to(weight.dtype), weight)
                yield comparison if name in edited else add_hint(comparison, UNEDITED_HINT)


def judge_evaluations(ctx: JudgeContext, step: int) -> Iterator[Comparison]:
    """Compare the forward in evaluation mode before a step and its edit, and the forward after the edit."""
    weights_before = ctx.rank_records("params", find_time(step) - 1)[0] if step else None
    times = {step: weights_before}
    if step == EDITED_STEP:
        times[STEPS] = ctx.rank_records("forward-params", step)[0]
    for time, weights in times.items():
        expected = [ctx.baseline.run_forward(at, time, weights) for at in range(ctx.data_size)]
        yield from ctx.compare_losses(time, expected, "evaluated")


# Minus a power of two, so every product is exact. Each rank scales its shard, or its whole parameter.
FACTOR = -0.5
# Moves biases alone, by numbers of few bits. The forward after the edit is exact, however tp splits its sums.
EXACT_STEPS = OptimizerSpec("sgd", {"lr": 0.0}, groups=(GroupSpec("*.bias", {"lr": 1.0}),))


def observe_edited_in_place(ctx: RankContext) -> None:
    """Make a step, scale every parameter in place, and make another step. Record whether one of these calls raised."""
    engine = ctx.build_engine(optimizer=choose_optimizer(ctx.config.mesh))
    train(ctx, engine, 0)
    ctx.record_training_state(engine, 1)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.mul_(FACTOR)
    is_refused = False
    try:
        ctx.record_training_state(engine, 2)
        train(ctx, engine, 2)
        ctx.record_training_state(engine, 3)
    except NotImplementedError:
        raise
    except Exception:  # noqa: BLE001 - any exception of an engine is a refusal
        is_refused = True
    ctx.record("refused", {"refused": scalar(is_refused)})
    engine.close()


def choose_optimizer(mesh: Mesh) -> OptimizerSpec:
    """Return AdamW, or on the axis tp an optimizer with exact steps, because tp splits the sums of the next forward."""
    return EXACT_STEPS if {TENSOR, CONTEXT} & set(mesh.axes) else ADAMW


def train(ctx: RankContext, engine: Engine, step: int) -> None:
    """Make one step, and record the loss and the gradients."""
    engine.backward(ctx.loss(engine, step))
    ctx.record("grads", engine.full_grads(), step)
    engine.step()
    engine.zero_grad()


def judge_edited_in_place(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check the step before the edit, and that all ranks refused the edit or trained on from the edited weights."""
    yield from compare_published_weights(ctx, RecordedStep(1, "masters"), "params")
    refusals = [record["refused"] for record in ctx.rank_records("refused")]
    yield from compare_ranks(ctx.location("refusal of the edit", Part.GATHER, 2), refusals)
    if any(bool(refused) for refused in refusals):
        return
    for rank, (before, after) in enumerate(
        zip(ctx.rank_records("params", 1), ctx.rank_records("params", 2), strict=True)
    ):
        for name, weight in before.items():
            place = ctx.location(name, Part.GATHER, 2, rank)
            comparison = compare_bitwise(place, FACTOR * weight, after[name])
            yield add_hint(comparison, UNCHANGED_HINT) if torch.equal(weight, after[name]) else comparison
    edited = RecordedStep(2, "masters", skipped_steps=1)
    for comparison in compare_published_weights(ctx, edited, "params"):
        yield add_hint(comparison, OLD_MASTER_HINT)
    local = ctx.compute_local_grads(2, ctx.rank_records("params", 2)[0])
    yield from ctx.compare_losses(2, local)
    yield from ctx.compare_reduced_grads("grads", [local], 2)
    yield from judge_step(ctx, choose_optimizer(ctx.mesh), ctx.rank_records("grads", 2)[0], edited)
    after_step = RecordedStep(3, "masters")
    yield from compare_ranks_after_step(ctx, after_step)
    yield from compare_published_weights(ctx, after_step, "params")


LAWS = (
    Law(
        name="parameters.edited_in_place",
        statement="after weights are edited in place on every rank, training continues from them, or the engine raises",
        tier=Tier.STAGED,
        models=("similar",),
        observe=observe_edited_in_place,
        judge=judge_edited_in_place,
        features=(Feature.PARAMETERS, Feature.IN_PLACE_EDITS, Feature.PARAM_GROUPS, Feature.SCHEDULE),
        weights_stay_integers=False,
        variants=(Variant(compares_engine_with_itself=True),),
        kept_because="the only edits of the module's own parameters, outside of gathered()",
    ),
    Law(
        name="parameters.edited_and_stepped",
        statement="forwards and steps after an edit of full weights use the edited weights, in every dtype",
        tier=Tier.STAGED,
        models=("similar",),
        observe=observe_edited_and_stepped,
        judge=judge_edited_and_stepped,
        features=(Feature.PARAMETERS, Feature.EDITS, Feature.PARAM_GROUPS, Feature.SCHEDULE),
        weights_stay_integers=False,
        variants=tuple(map(Variant, ("", BEFORE_STEP, PARTLY, EVALUATED))),
        kept_because="the only edits that an optimizer step follows, and the only edits of weights with masters",
    ),
)
