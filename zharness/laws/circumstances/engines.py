"""Define the law engines.one_closed: closing one engine does not change the training of another engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from zharness.engines.protocol import Engine, Feature
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, Variant
from zharness.law_kit.optimizers import UNIT_LR_SGD
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.law_kit.scenarios import Participant
from zharness.law_kit.window_judge import judge_windows
from zharness.law_kit.window_scenarios import WindowScenario, train_windows
from zharness.laws.circumstances.common import ALL_EXPERTS, sum_loss, train_route
from zharness.parity import Comparison, Tier
from zharness.parity.certificate import is_power_of_two

BEFORE_STEPS, BETWEEN_STEPS, BEFORE_BACKWARD = "before_any_step", "between_steps", "before_backward"
AFTER_BACKWARD = "after_backward"

FIRST, SECOND, THIRD = "-first", "-second", "-third"  # suffixes of the labels under which the engines are recorded


def train(participant: Participant, window: int, micro: int) -> None:
    """Train one micro-batch through every expert."""
    train_route(participant, window, ALL_EXPERTS)


SCENARIO = WindowScenario(train, windows=2)


def observe_one_closed(ctx: RankContext) -> None:
    """Train two engines, close the first at the point that the law variant names, and then train a third engine."""
    ctx.record("setting", {"exact": scalar(is_power_of_two(ctx.data_size) or not ctx.capabilities.scaled_sum)})
    first, second = (ctx.build_engine(optimizer=UNIT_LR_SGD) for _ in range(2))
    if ctx.variant != BEFORE_STEPS:
        train_windows(ctx, first, SCENARIO, FIRST)
    else:
        first.close()
    train_windows(ctx, second, close_during(ctx.variant, first), SECOND)
    third = ctx.build_engine(optimizer=UNIT_LR_SGD)
    train_windows(ctx, third, SCENARIO, THIRD)
    second.close()
    third.close()


def close_during(variant: str, engine: Engine) -> WindowScenario:
    """Return a scenario that closes ``engine`` in its first window, unless the law variant closes it beforehand."""

    def close_in_first_window(participant: Participant, window: int) -> None:
        """Close the engine in the first accumulation window."""
        if window == 0:
            engine.close()

    def close_before_backward(participant: Participant, window: int, micro: int) -> None:
        """Train one micro-batch; in the first accumulation window, close the engine between forward and backward."""
        batch = participant.get_batch(window)
        loss = sum_loss(participant.call(batch.inputs), batch.target)
        close_in_first_window(participant, window)
        participant.backward(loss)

    changes: Mapping[str, WindowScenario] = {
        BEFORE_STEPS: SCENARIO,
        BETWEEN_STEPS: replace(SCENARIO, after_step=close_in_first_window),
        BEFORE_BACKWARD: replace(SCENARIO, train=close_before_backward),
        AFTER_BACKWARD: replace(SCENARIO, before_step=close_in_first_window),
    }
    return changes[variant]


def judge_one_closed(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the weights after every step of every engine that trained."""
    for suffix in (SECOND, THIRD) if ctx.variant == BEFORE_STEPS else (FIRST, SECOND, THIRD):
        yield from judge_windows(ctx, SCENARIO, suffix)


LAWS = (
    Law(
        name="engines.one_closed",
        statement="an engine keeps training as plain PyTorch does when another engine of the same process is closed",
        tier=Tier.EXACT,
        models=("experts",),
        observe=observe_one_closed,
        judge=judge_one_closed,
        features=(Feature.PARAMETERS,),
        variants=tuple(map(Variant, (BEFORE_STEPS, BETWEEN_STEPS, BEFORE_BACKWARD, AFTER_BACKWARD))),
        dtypes=("fp32",),
        kept_because="the only law that closes one of several engines and continues to train the others",
    ),
)
