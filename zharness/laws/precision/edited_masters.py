"""Define the law precision.edited_masters: an edit of weights in bf16 reaches the masters of every rank."""

from __future__ import annotations

from collections.abc import Iterator

from zharness.engines.protocol import Engine, Feature
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.optimizer_step import (
    RecordedStep,
    compare_published_weights,
    compare_ranks_after_step,
    judge_step,
)
from zharness.law_kit.rank_context import RankContext
from zharness.laws.parameters_edited import edit
from zharness.laws.precision.common import LOW_DTYPE, precision_law
from zharness.laws.precision.grad_scaler import ADAMW
from zharness.laws.precision.master_weights import BF16_OPTIONS
from zharness.parity import Comparison, Part, compare_bitwise

FIRST_STEP, EDIT = 1, 2  # the numbers under which the weights after the first step and after the edit are recorded
LAST_STEP = RecordedStep(EDIT + 1, "masters")


def observe_edited_masters(ctx: RankContext) -> None:
    """Make a step, replace all weights, and make another step."""
    engine = ctx.build_engine(optimizer=ADAMW, options={"bf16": BF16_OPTIONS})
    make_step(ctx, engine, FIRST_STEP - 1)
    ctx.record_training_state(engine, FIRST_STEP)
    edit(ctx, engine)
    ctx.record_training_state(engine, EDIT)
    make_step(ctx, engine, EDIT)
    ctx.record_training_state(engine, LAST_STEP.step)
    engine.close()


def make_step(ctx: RankContext, engine: Engine, number: int) -> None:
    """Make a step in bf16, and record its gradients."""
    batch = ctx.batch(number).to(LOW_DTYPE)
    engine.backward(ctx.spec.loss(engine(batch.inputs), batch.target))
    ctx.record("grads", engine.full_grads(), number)
    engine.step()
    engine.zero_grad()


def judge_edited_masters(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare weights and masters after the edit with the edited weights, and judge the step that starts from them."""
    edited = ctx.rank_records("edited")[0]
    for label in ("params", "masters"):
        for rank, record in enumerate(ctx.rank_records(label, EDIT)):
            for name, value in record.items():
                place = ctx.location(name, Part.GATHER, FIRST_STEP, rank)
                yield compare_bitwise(place, edited[name].to(value.dtype), value)
    before = RecordedStep(EDIT, "masters", skipped_steps=EDIT - FIRST_STEP)
    yield from judge_step(ctx, ADAMW, ctx.rank_records("grads", EDIT)[0], before)
    yield from compare_ranks_after_step(ctx, LAST_STEP)
    yield from compare_published_weights(ctx, LAST_STEP, "params")


LAWS = (
    precision_law(
        "edited_masters",
        "an edit of bf16 weights also changes the master weights of every rank, and the next step starts from them",
        observe_edited_masters,
        judge_edited_masters,
        features=(Feature.MASTERS, Feature.PARAMETERS, Feature.EDITS),
        kept_because="the only edits of weights with masters on a mesh, where a run without --dtype has fp32 cells",
        weights_stay_integers=True,  # no gradient is compared
    ),
)
