"""Define the law values.schedule: a schedule advances with every applied step, and not with a skipped step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zharness.engines.protocol import Absent, Engine, Feature, OptimizerSpec
from zharness.errors import EngineContractError
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, Variant
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.laws.circumstances.common import sum_loss
from zharness.laws.circumstances.not_finite import Outcome, step_and_classify
from zharness.laws.circumstances.values import NOT_FINITE
from zharness.parity import Comparison, Part, Tier, compare_bitwise, compare_ranks

ZERO, NO_BACKWARD = "zero", "no_backward"
# The factor by which rank 0 multiplies its loss in one step; if the factor is zero, all ranks multiply their losses.
FACTORS = {**NOT_FINITE, ZERO: 0.0, NO_BACKWARD: 1.0}
HALVING = OptimizerSpec(name="sgd", args={"lr": 1.0}, schedule=(1.0, 0.5, 0.25, 0.125))
STEPS = 3
SPECIAL_STEP = 1


def observe_schedule(ctx: RankContext) -> None:
    """Make steps, one of them with gradients that are infinite, NaN, zero or missing; record each learning rate.

    For an engine that reports no learning rates, record the gradients and the weights around each step instead.
    """
    engine = ctx.build_engine(optimizer=HALVING)
    reports_rates = not isinstance(engine.observe().learning_rates, Absent)
    for step in range(STEPS):
        batch = ctx.batch(step)
        is_changed = step == SPECIAL_STEP and (ctx.data_coordinate == 0 or ctx.variant == ZERO)
        factor = FACTORS[ctx.variant] if is_changed else 1.0
        if ctx.variant != NO_BACKWARD or step != SPECIAL_STEP:
            engine.backward(factor * sum_loss(engine(batch.inputs), batch.target))
        if not reports_rates:
            ctx.record("before", engine.full_params(), step)
            ctx.record("grads", engine.full_grads(), step)
        ctx.record("outcome", {"outcome": scalar(step_and_classify(engine))}, step)
        engine.zero_grad()
        if reports_rates:
            ctx.record("rates", read_learning_rate(engine), step + 1)
        else:
            ctx.record("after", engine.full_params(), step)
    engine.close()


def read_learning_rate(engine: Engine) -> dict[str, Tensor]:
    """Return the learning rate of the only parameter group, which the engine has reported before."""
    rates = engine.observe().learning_rates
    if isinstance(rates, Absent):
        raise EngineContractError(
            f"engine.observe() stopped reporting learning_rates: {rates.reason}; expected the rates after every step"
        )
    return {"learning rate": torch.tensor(rates[0], dtype=torch.float64)}


def judge_schedule(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare every learning rate with that of the schedule after the steps that the engine says it has applied."""
    applied = 0
    for step in range(STEPS):
        outcomes = [record["outcome"] for record in ctx.rank_records("outcome", step)]
        yield from compare_ranks(ctx.location("outcome", Part.OPTIMIZER, step), outcomes)
        is_applied = bool(outcomes[0] == Outcome.APPLIED)
        if is_applied and ctx.has_record("grads"):
            yield from compare_updates(ctx, step, HALVING.schedule[applied])
        applied += int(is_applied)
        for rank, record in enumerate(ctx.rank_records("rates", step + 1) if ctx.has_record("rates") else ()):
            for name, rate in record.items():
                place = ctx.location(name, Part.OPTIMIZER, step, rank)
                wanted = torch.tensor(HALVING.schedule[applied], dtype=torch.float64)
                yield compare_bitwise(place, wanted, rate)


def compare_updates(ctx: JudgeContext, step: int, factor: float) -> Iterator[Comparison]:
    """Compare the weights after a step with those of SGD at the rate ``factor``, bitwise: a power of two is exact."""
    records = (ctx.rank_records(label, step) for label in ("before", "grads", "after"))
    for rank, (before, grads, after) in enumerate(zip(*records, strict=True)):
        for name, grad in grads.items():
            yield compare_bitwise(
                ctx.location(name, Part.OPTIMIZER, step, rank), before[name] - factor * grad, after[name]
            )


LAWS = (
    Law(
        name="values.schedule",
        statement="the learning-rate schedule advances with every applied step, and not with a skipped step",
        tier=Tier.EXACT,
        models=("experts",),
        observe=observe_schedule,
        judge=judge_schedule,
        features=(Feature.PARAMETERS, Feature.SCHEDULE),
        weights_stay_integers=False,
        dtypes=("fp32",),
        variants=tuple(Variant(name, compares_engine_with_itself=True) for name in FACTORS),
        kept_because="the only learning rates after an applied step whose gradients are not finite",
    ),
)
