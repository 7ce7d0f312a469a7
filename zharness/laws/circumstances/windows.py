"""Define the laws of the group ``window``: micro-batches of one accumulation window that use different parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from zharness.engines.protocol import AccumulationOwner, Feature
from zharness.law_kit.scenarios import Participant
from zharness.law_kit.window_law import window_law
from zharness.law_kit.window_scenarios import WindowScenario
from zharness.laws.circumstances.common import ACCUMULATIONS, ALL_EXPERTS, train_route

ROUTED_EXPERT = 1  # the expert that only some micro-batches use; the others are used by all
ALWAYS_USED = tuple(index for index in ALL_EXPERTS if index != ROUTED_EXPERT)

RouteChoice = Callable[[Participant, int, int], bool]  # (participant, micro-batch, their number) -> is the expert used

# Which micro-batches of a window use the expert, and the accumulations with which the law tries it.
CHOICES_FOR_ALL_RANKS: Mapping[str, tuple[RouteChoice, tuple[str, ...]]] = {
    "first": (lambda participant, micro, count: micro == 0, ("2_by_engine", "2_by_caller", "4_by_engine")),
    "last": (lambda participant, micro, count: micro == count - 1, ("2_by_engine", "4_by_caller")),
}

CHOICES_FOR_SOME_RANKS: Mapping[str, tuple[RouteChoice, tuple[str, ...]]] = {
    "first_of_rank_0": (
        lambda participant, micro, count: micro == 0 and participant.rank == 0,
        ("2_by_engine", "4_by_caller"),
    ),
    "in_turns": (lambda participant, micro, count: micro == participant.rank % count, ("2_by_caller", "4_by_engine")),
}


def make_route_scenarios(
    choices: Mapping[str, tuple[RouteChoice, tuple[str, ...]]], is_uneven: bool
) -> dict[str, WindowScenario]:
    """Return a scenario for each pair of a choice (which micro-batches use the expert) and one of its accumulations."""
    return {
        f"{name}_{accumulation}": make_route_scenario(choice, *ACCUMULATIONS[accumulation], is_uneven)
        for name, (choice, accumulations) in choices.items()
        for accumulation in accumulations
    }


def make_route_scenario(
    choice: RouteChoice, micro_batches: int, owner: AccumulationOwner, is_uneven: bool
) -> WindowScenario:
    """Return a scenario in which ``choice`` selects the micro-batches that use the expert.

    No micro-batch of the second window uses the expert.
    """

    def train(participant: Participant, window: int, micro: int) -> None:
        """Train one micro-batch with the expert or without it."""
        used = window != 1 and choice(participant, micro, micro_batches)
        train_route(participant, window * micro_batches + micro, ALL_EXPERTS if used else ALWAYS_USED)

    return WindowScenario(train, micro_batches=micro_batches, owner=owner, is_uneven=is_uneven)


LAWS = (
    window_law(
        "window.partly_used",
        make_route_scenarios(CHOICES_FOR_ALL_RANKS, is_uneven=False),
        "a weight that only some micro-batches of a window use is stepped with the sum of their gradients",
        kept_because="the only windows whose micro-batches use different weights, after which the weights are compared",
    ),
    window_law(
        "window.partly_used_on_some_ranks",
        make_route_scenarios(CHOICES_FOR_SOME_RANKS, is_uneven=True),
        "a weight that only some ranks use, each in another micro-batch of a window, gets the sum of their gradients",
        features=(Feature.UNEVEN_RANKS,),
        kept_because="the only windows in which ranks use different weights in the same micro-batch",
    ),
)
