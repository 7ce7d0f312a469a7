"""Define the laws of the group ``pipeline`` about steps that stages have to make alike: a rate, and an overflow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zharness.engines.protocol import Feature
from zharness.law_kit.engine_facts import collect_engine_facts, compare_engine_facts
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Variant
from zharness.law_kit.optimizer_step import RecordedStep, compare_ranks_after_step, judge_step
from zharness.law_kit.rank_context import RankContext
from zharness.laws.pipeline import MOMENTUM_SGD, WINDOW, pipeline_law, run_batch
from zharness.parity import Comparison

HALVING = replace(MOMENTUM_SGD, schedule=(1.0, 0.5, 0.25))  # powers of two, so that a product with a rate is exact
STEPS = len(HALVING.schedule) - 1


def observe_learning_rate(ctx: RankContext) -> None:
    """Make steps at rates that a schedule halves, and record what each rank reports of its rate after each."""
    engine = ctx.build_engine(optimizer=HALVING)
    ctx.record_training_state(engine, 0)
    for step in range(STEPS):
        run_batch(ctx, engine, step, WINDOW)
        engine.step()
        engine.zero_grad()
        ctx.record("facts", collect_engine_facts(engine), step + 1)
        ctx.record_training_state(engine, step + 1)
    engine.close()


def judge_learning_rate(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare weights and state after each step with SGD's formula at its rate, and then the rates of all ranks.

    The formula takes the engine's own gradients; other laws compare them.
    """
    for step in range(STEPS):
        yield from judge_step(ctx, HALVING, ctx.rank_records("grads", step)[0], RecordedStep(step))
        yield from compare_ranks_after_step(ctx, RecordedStep(step + 1))
        yield from compare_engine_facts(ctx, HALVING, step + 1, step + 1)


LAWS = (
    pipeline_law(
        "learning_rate",
        "the learning-rate schedule goes on in every stage: each step has its rate, and all ranks report the next one",
        observe_learning_rate,
        judge_learning_rate,
        (Variant(),),
        Feature.SCHEDULE,
        kept_because="the only law of a pipeline whose learning rate changes",
    ),
)
