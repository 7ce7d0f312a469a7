"""Define laws about the momentum and the decay of weights that are idle, frozen, or have gradients of zero.

Plain SGD moves a weight by its gradient alone, so that a gradient of zero and none at all are the same to it. With
momentum and weight decay they are not: torch.optim leaves a weight without a gradient, and its momentum, as they are,
and moves a weight whose gradient is zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from zharness.engines.protocol import Feature, GroupSpec
from zharness.law_kit.scenarios import Participant
from zharness.law_kit.window_law import window_law
from zharness.law_kit.window_scenarios import WindowScenario
from zharness.laws.circumstances.common import ALL_EXPERTS, make_accumulated, sum_loss
from zharness.laws.circumstances.idle_weights import (
    ROUTES,
    TRAINED,
    make_freezing_scenarios,
    train_after_zeroing,
    train_window_route,
)

# Integers, so that every update is an integer; a decay of 2 turns weights around, and leaves their size as it is.
MOMENTUM, WEIGHT_DECAY = 1, 2


# The experts are in the second group, which overrides nothing.
EXPERT_GROUPS = (GroupSpec("experts.*", {}),)


def with_momentum(scenario: WindowScenario) -> WindowScenario:
    """Return ``scenario`` with an optimizer that has momentum and weight decay."""
    return replace(scenario, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)


@dataclass(frozen=True)
class TrainWithZeroLosses:
    """A script whose losses are zero in the second accumulation window, on rank 0 or on all ranks.

    The third window does not use one of the experts if ``then_idle``; every other window uses all of them.
    """

    zero_on_all_ranks: bool = True
    then_idle: bool = False

    def __call__(self, participant: Participant, window: int, micro: int) -> None:
        is_zero = window == 1 and (self.zero_on_all_ranks or participant.rank == 0)
        route = tuple(index for index in ALL_EXPERTS if not (self.then_idle and window == 2 and index == TRAINED))
        batch = participant.get_batch(window + 4 * micro)
        loss = sum_loss(participant.call(batch.inputs, route=route), batch.target)
        participant.backward(0 * loss if is_zero else loss)


def with_accumulations(scenario: WindowScenario, name: str = "") -> Mapping[str, WindowScenario]:
    """Return ``scenario`` with momentum, alone and in accumulation windows, by the name of the law variant."""
    scenario = with_momentum(scenario)
    windows = {each: make_accumulated(scenario, each) for each in ("2_by_engine", "2_by_caller")}
    return {name: scenario, **{f"{name}_{each}".strip("_"): window for each, window in windows.items()}}


FREEZING = {name: with_momentum(scenario) for name, scenario in make_freezing_scenarios().items()}
ZERO_LOSSES = {
    **with_accumulations(WindowScenario(TrainWithZeroLosses()), "all_ranks"),
    **with_accumulations(WindowScenario(TrainWithZeroLosses(zero_on_all_ranks=False)), "one_rank"),
}

LAWS = (
    window_law(
        "idle.momentum",
        {
            **with_accumulations(WindowScenario(train_window_route, windows=len(ROUTES))),
            **with_accumulations(WindowScenario(TrainWithZeroLosses(then_idle=True), windows=4), "after_zero_loss"),
            "groups": with_momentum(WindowScenario(train_window_route, windows=len(ROUTES), groups=EXPERT_GROUPS)),
            "zeroed_in_place": with_momentum(WindowScenario(train_after_zeroing, windows=len(ROUTES))),
        },
        "momentum and weight decay move no weight in a step that does not use it, and go on in the next that does",
        features=(Feature.NO_GRADIENT,),
        kept_because="the only idle weights that have momentum from steps that used them",
    ),
    window_law(
        "idle.frozen_momentum",
        FREEZING,
        "momentum and weight decay move no weight that is frozen, and go on where they were once it is unfrozen",
        features=(Feature.UNFREEZING,),
        kept_because="the only weights with momentum that are unfrozen again after steps in which they were frozen",
    ),
    window_law(
        "values.zero_loss_momentum",
        ZERO_LOSSES,
        "a step whose gradients are all zero moves every weight by its momentum and its decay",
        kept_because="the only steps with gradients of zero that torch.optim does not leave without effect",
    ),
)
