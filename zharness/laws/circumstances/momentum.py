"""Define laws about the momentum and the decay of weights that are idle, frozen, or have gradients of zero.

Plain SGD moves a weight by its gradient alone, so a gradient of zero and a missing gradient have the same effect. With
momentum and weight decay they differ: torch.optim changes neither a weight without a gradient nor its momentum, but
moves a weight whose gradient is zero.
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

# Integers, so that every update is an integer; a decay of 2 changes the sign of a weight and keeps its magnitude.
MOMENTUM, WEIGHT_DECAY = 1, 2


# The experts are in the second group, which overrides nothing.
EXPERT_GROUPS = (GroupSpec("experts.*", {}),)


def with_momentum(scenario: WindowScenario) -> WindowScenario:
    """Return ``scenario`` with an optimizer that has momentum and weight decay."""
    return replace(scenario, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)


@dataclass(frozen=True)
class TrainWithZeroLosses:
    """A script whose losses are zero in the second accumulation window, on rank 0 or on all ranks.

    If ``then_idle`` is true, the third window does not use one of the experts. The other windows use all experts.
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
        "momentum and weight decay move no weight in a step that does not use it, and resume when a step uses it",
        features=(Feature.NO_GRADIENT,),
        kept_because="the only idle weights that have momentum from steps that used them",
    ),
    window_law(
        "idle.frozen_momentum",
        FREEZING,
        "momentum and weight decay do not move a frozen weight; the old momentum applies once it is unfrozen",
        features=(Feature.UNFREEZING,),
        kept_because="the only weights with momentum that are unfrozen again after steps in which they were frozen",
    ),
    window_law(
        "values.zero_loss_momentum",
        ZERO_LOSSES,
        "a step whose gradients are all zero moves every weight by its momentum and its decay",
        kept_because="the only steps with gradients of zero in which torch.optim moves the weights",
    ),
)
