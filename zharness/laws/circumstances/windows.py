"""Define the laws in which the micro-batches of one accumulation window use different parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from zharness.engines.protocol import AccumulationOwner, Feature
from zharness.law_kit.clipping import NEVER_CLIPS
from zharness.law_kit.scenarios import Participant
from zharness.law_kit.setting import BackwardCall
from zharness.law_kit.window_law import window_law
from zharness.law_kit.window_scenarios import WindowScenario
from zharness.laws.circumstances.common import ACCUMULATIONS, ALL_EXPERTS, make_accumulated, sum_loss, train_route

ROUTED_EXPERT = 1  # only some micro-batches use this expert; all micro-batches use the other experts
ALWAYS_USED = tuple(index for index in ALL_EXPERTS if index != ROUTED_EXPERT)

# (participant, window, micro-batch, number of micro-batches) -> whether the micro-batch uses the expert
RouteChoice = Callable[[Participant, int, int, int], bool]


def is_first(_participant: Participant, _window: int, micro: int, _count: int) -> bool:
    """Return whether a micro-batch is the first of its accumulation window."""
    return micro == 0


def is_last(_participant: Participant, _window: int, micro: int, count: int) -> bool:
    """Return whether a micro-batch is the last of its accumulation window."""
    return micro == count - 1


def is_every_other(_participant: Participant, _window: int, micro: int, _count: int) -> bool:
    """Return whether a micro-batch is the first, third, ... of its accumulation window."""
    return micro % 2 == 0


def is_first_of_rank_0(participant: Participant, _window: int, micro: int, _count: int) -> bool:
    """Return whether a micro-batch is the first of its accumulation window, and this rank is rank 0."""
    return micro == 0 and participant.rank == 0


def is_turn_of_rank(participant: Participant, _window: int, micro: int, count: int) -> bool:
    """Return whether a micro-batch is the only one of its accumulation window in which this rank uses the expert."""
    return micro == participant.rank % count


def is_window_of_rank(participant: Participant, window: int, micro: int, _count: int) -> bool:
    """Return whether a micro-batch is the first of a window in which this rank uses the expert.

    In the first window, all ranks except rank 0 use the expert. In later windows only rank 0 uses it.
    """
    return micro == 0 and (participant.rank == 0) == (window > 0)


# Maps a name to the choice of micro-batches that use the expert, and to the accumulations under which it is tested.
CHOICES_FOR_ALL_RANKS: Mapping[str, tuple[RouteChoice, tuple[str, ...]]] = {
    "first": (is_first, ("2_by_engine", "2_by_caller", "4_by_engine")),
    "last": (is_last, ("2_by_engine", "4_by_caller")),
    "every_other": (is_every_other, ("4_by_engine",)),
}

CHOICES_FOR_SOME_RANKS: Mapping[str, tuple[RouteChoice, tuple[str, ...]]] = {
    "first_of_rank_0": (
        is_first_of_rank_0,
        ("2_by_engine", "4_by_caller", "1"),
    ),
    "changing_ranks": (is_window_of_rank, ("1", "2_by_engine")),
    "in_turns": (is_turn_of_rank, ("2_by_caller", "4_by_engine")),
}


def make_route_scenarios(
    choices: Mapping[str, tuple[RouteChoice, tuple[str, ...]]], is_uneven: bool
) -> dict[str, WindowScenario]:
    """Return a scenario for each choice of micro-batches that use the expert, with each accumulation of that choice."""
    return {
        f"{name}_{accumulation}": make_route_scenario(choice, *ACCUMULATIONS[accumulation], is_uneven)
        for name, (choice, accumulations) in choices.items()
        for accumulation in accumulations
    }


@dataclass(frozen=True)
class TrainChosenRoute:
    """Train one micro-batch with the expert, if ``choice`` selects the micro-batch, or without the expert."""

    choice: RouteChoice
    micro_batches: int

    def __call__(self, participant: Participant, window: int, micro: int) -> None:
        used = window != 1 and self.choice(participant, window, micro, self.micro_batches)
        train_route(participant, window * self.micro_batches + micro, ALL_EXPERTS if used else ALWAYS_USED)


def make_route_scenario(
    choice: RouteChoice, micro_batches: int, owner: AccumulationOwner, is_uneven: bool
) -> WindowScenario:
    """Return a scenario in which ``choice`` selects the micro-batches that use the expert.

    No micro-batch of the second accumulation window uses the expert.
    """
    train = TrainChosenRoute(choice, micro_batches)
    return WindowScenario(train, micro_batches=micro_batches, owner=owner, is_uneven=is_uneven)


FOR_ALL_RANKS = make_route_scenarios(CHOICES_FOR_ALL_RANKS, is_uneven=False)
SCALED = {
    f"{name}_scaled": replace(FOR_ALL_RANKS[name], backward_call=BackwardCall.SCALE)
    for name in ("first_2_by_engine", "first_4_by_engine")
}
READ_INSIDE = {
    f"{name}_read": replace(FOR_ALL_RANKS[name], reads_inside=True)
    for name in ("first_2_by_engine", "first_4_by_engine")
}
FOR_SOME_RANKS = make_route_scenarios(CHOICES_FOR_SOME_RANKS, is_uneven=True)
WITH_NORM = {
    f"{name}_norm": replace(FOR_SOME_RANKS[name], clip=NEVER_CLIPS)
    for name in ("changing_ranks_1", "first_of_rank_0_2_by_engine")
}
# The last backward of a window reduces the gradients, and does not use the expert.
IN_NO_SYNC = {"first_2_in_no_sync": replace(FOR_ALL_RANKS["first_2_by_caller"], in_no_sync=True)}


@dataclass(frozen=True)
class TrainWithReadOutside:
    """Train one micro-batch whose loss adds ``factor`` times the weight of an expert, read after the forward."""

    factor: int = 1

    def __call__(self, participant: Participant, window: int, micro: int) -> None:
        batch = participant.get_batch(2 * window + micro)
        loss = sum_loss(participant.call(batch.inputs, route=ALL_EXPERTS), batch.target)
        read = participant.module.experts[ROUTED_EXPERT].weight.sum()
        participant.backward(loss + self.factor * (micro + 1) * read)


def train_after_read_without_gradients(participant: Participant, window: int, micro: int) -> None:
    """Train one micro-batch whose forward first calls an expert under no_grad, and then with gradients."""
    expert = participant.module.experts[ROUTED_EXPERT]

    @torch.no_grad()
    def call_expert(_module: nn.Module, _inputs: object, hidden: Tensor) -> None:
        """Call the expert on the output of the first layer."""
        expert(hidden)

    hook = participant.module.first.register_forward_hook(call_expert)
    train_route(participant, 2 * window + micro, ALL_EXPERTS)
    hook.remove()


READ_OUTSIDE = make_accumulated(
    WindowScenario(TrainWithReadOutside(), windows=2, features=(Feature.OUTSIDE_FORWARD,)), "2_by_engine"
)
UNDIVIDED_READ_HINT = "the weight that the loss reads outside of the forward is not divided by the accumulation steps"
READ_WITHOUT_GRADIENTS = WindowScenario(train_after_read_without_gradients, windows=2)
FURTHER_READS = {
    "outside_2_by_engine": replace(
        READ_OUTSIDE, wrong_scripts={UNDIVIDED_READ_HINT: TrainWithReadOutside(READ_OUTSIDE.divisor)}
    ),
    "no_grad_first": READ_WITHOUT_GRADIENTS,
    "no_grad_first_2_by_engine": make_accumulated(READ_WITHOUT_GRADIENTS, "2_by_engine"),
}

LAWS = (
    window_law(
        "window.partly_used",
        FOR_ALL_RANKS | SCALED | READ_INSIDE | IN_NO_SYNC,
        "a weight that only some micro-batches of a window use is updated by the sum of their gradients",
        kept_because="the only windows whose micro-batches use different weights, after which the weights are compared",
    ),
    window_law(
        "window.partly_used_on_some_ranks",
        FOR_SOME_RANKS | WITH_NORM,
        "if only some ranks use a weight, in different micro-batches of a window, it gets the sum of their gradients",
        features=(Feature.UNEVEN_RANKS,),
        kept_because="the only windows in which ranks use different weights in the same micro-batch",
    ),
    window_law(
        "window.further_reads",
        FURTHER_READS,
        "a step applies all gradients of a weight that is also read outside the forward, or under no_grad inside it",
        kept_because="the only forwards that read a weight under no_grad before they read it with gradients",
    ),
)
