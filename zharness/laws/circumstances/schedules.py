"""Define the law values.schedule: a schedule advances with every step that is applied, and with no other."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zharness.engines.protocol import Absent, Engine, Feature, OptimizerSpec
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, Variant
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.laws.circumstances.common import sum_loss
from zharness.laws.circumstances.not_finite import Outcome, step_and_classify
from zharness.laws.circumstances.values import NOT_FINITE
from zharness.parity import Comparison, Part, Tier, compare_bitwise, compare_ranks

ZERO = "zero"
FACTORS = {**NOT_FINITE, ZERO: 0.0}  # by which rank 0 multiplies its loss in one step; all ranks do so if it is zero
HALVING = OptimizerSpec(name="sgd", args={"lr": 1.0}, schedule=(1.0, 0.5, 0.25, 0.125))
STEPS = 3
SPECIAL_STEP = 1


def observe_schedule(ctx: RankContext) -> None:
    """Make steps, one of them with gradients that are infinite, NaN or zero, and record each learning rate."""
    engine = ctx.build_engine(optimizer=HALVING)
    ctx.record("rates", read_learning_rates(engine), 0)
    for step in range(STEPS):
        batch = ctx.batch(step)
        is_changed = step == SPECIAL_STEP and (ctx.data_coordinate == 0 or ctx.variant == ZERO)
        factor = FACTORS[ctx.variant] if is_changed else 1.0
        engine.backward(factor * sum_loss(engine(batch.inputs), batch.target))
        ctx.record("outcome", {"outcome": scalar(step_and_classify(engine))}, step)
        engine.zero_grad()
        ctx.record("rates", read_learning_rates(engine), step + 1)
    engine.close()


def read_learning_rates(engine: Engine) -> dict[str, Tensor]:
    """Return the learning rate of the only parameter group, or nothing if the engine reports none."""
    rates = engine.observe().learning_rates
    return {} if isinstance(rates, Absent) else {"learning rate": torch.tensor(rates[0], dtype=torch.float64)}


def judge_schedule(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare every learning rate with that of the schedule after the steps that the engine says it has applied."""
    applied = 0
    for step in range(STEPS):
        outcomes = [record["outcome"] for record in ctx.rank_records("outcome", step)]
        yield from compare_ranks(ctx.location("outcome", Part.OPTIMIZER, step), outcomes)
        applied += int(outcomes[0] == Outcome.APPLIED)
        for rank, record in enumerate(ctx.rank_records("rates", step + 1)):
            for name, rate in record.items():
                place = ctx.location(name, Part.OPTIMIZER, step, rank)
                wanted = torch.tensor(HALVING.schedule[applied], dtype=torch.float64)
                yield compare_bitwise(place, wanted, rate)


LAWS = (
    Law(
        name="values.schedule",
        statement="the schedule advances with every applied step, whatever its gradients, and with no skipped one",
        tier=Tier.EXACT,
        models=("experts",),
        observe=observe_schedule,
        judge=judge_schedule,
        features=(Feature.PARAMETERS, Feature.SCHEDULE),
        weights_stay_integers=False,
        dtypes=("fp32",),
        variants=tuple(Variant(name, compares_engine_with_itself=True) for name in FACTORS),
        kept_because="the only learning rates after a step that was applied with gradients that are not finite",
    ),
)
