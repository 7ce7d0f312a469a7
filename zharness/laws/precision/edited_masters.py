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

STEPPED, EDITED = 1, 2  # the numbers of what is recorded after the first step, and after the edit
LAST = RecordedStep(EDITED + 1, "masters")  # after the second step


def observe_edited_masters(ctx: RankContext) -> None:
    """Make a step, replace all weights, and make another step."""
    engine = ctx.build_engine(optimizer=ADAMW, options={"bf16": BF16_OPTIONS})
    make_step(ctx, engine, STEPPED - 1)
    ctx.record_training_state(engine, STEPPED)
    edit(ctx, engine)
    ctx.record_training_state(engine, EDITED)
    make_step(ctx, engine, EDITED)
    ctx.record_training_state(engine, LAST.step)
    engine.close()


def make_step(ctx: RankContext, engine: Engine, number: int) -> None:
    """Make a step in bf16, and record its gradients."""
    batch = ctx.batch(number).to(LOW_DTYPE)
    engine.backward(ctx.spec.loss(engine(batch.inputs), batch.target))
    ctx.record("grads", engine.full_grads(), number)
    engine.step()
    engine.zero_grad()


def judge_edited_masters(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare weights and masters after the edit with the edited weights, and judge the step from there."""
    edited = ctx.rank_records("edited")[0]
    for label in ("params", "masters"):
        for rank, record in enumerate(ctx.rank_records(label, EDITED)):
            for name, value in record.items():
                place = ctx.location(name, Part.GATHER, STEPPED, rank)
                yield compare_bitwise(place, edited[name].to(value.dtype), value)
    before = RecordedStep(EDITED, "masters", skipped_steps=EDITED - STEPPED)
    yield from judge_step(ctx, ADAMW, ctx.rank_records("grads", EDITED)[0], before)
    yield from compare_ranks_after_step(ctx, LAST)
    yield from compare_published_weights(ctx, LAST, "params")


LAWS = (
    precision_law(
        "edited_masters",
        "an edit of weights in bf16 reaches the masters of every rank, from which the next step goes on",
        observe_edited_masters,
        judge_edited_masters,
        features=(Feature.MASTERS, Feature.PARAMETERS, Feature.EDITS),
        kept_because="the only edits of weights with masters on a mesh, where a run without --dtype has cells in fp32",
    ),
)
