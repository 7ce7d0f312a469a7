"""Define the laws of the group ``idle``: weights that a step does not train, although an earlier step did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from zharness.engines.protocol import Feature
from zharness.law_kit.clipping import NEVER_CLIPS
from zharness.law_kit.scenarios import Participant
from zharness.law_kit.window_law import window_law
from zharness.law_kit.window_scenarios import WindowScenario, WindowScript
from zharness.laws.circumstances.common import ALL_EXPERTS, make_accumulated, train_route

# The experts that each window uses; the last window uses none.
ROUTES: tuple[tuple[int, ...], ...] = (ALL_EXPERTS, (0, 2), (1,), ())


def train_window_route(participant: Participant, window: int, micro: int) -> None:
    """Train one micro-batch through the experts that this accumulation window uses."""
    train_route(participant, window + len(ROUTES) * micro, ROUTES[window])


DISCARDED_BATCHES = (16, 17)  # no window trains these micro-batches


def train_after_discarding(participant: Participant, window: int, micro: int) -> None:
    """Train one micro-batch, after discarding the gradients of two others, of which the second uses one expert.

    An engine that discards only the gradients of the last backward keeps those of the other experts.
    """
    if window == 0 and micro == 0:
        train_route(participant, DISCARDED_BATCHES[0], ALL_EXPERTS)
        train_route(participant, DISCARDED_BATCHES[1], ALL_EXPERTS[:1])
        participant.zero_grad()
    train_route(participant, window, ALL_EXPERTS[1:])


def zero_by_module(participant: Participant, window: int) -> None:
    """Zero the gradients of the module in place, as the caller of the engine may do before ``engine.zero_grad()``."""
    participant.module.zero_grad(set_to_none=False)


def train_after_zeroing(participant: Participant, window: int, micro: int) -> None:
    """Train the experts of the window after gradients of all experts were zeroed in place and then discarded."""
    train_route(participant, DISCARDED_BATCHES[0], ALL_EXPERTS)
    zero_by_module(participant, window)
    participant.zero_grad()
    train_window_route(participant, window, micro)


TRAINED = 1  # the expert that is frozen and unfrozen

# Whether the expert is trained in each window.
FREEZING_PLANS: Mapping[str, tuple[bool, ...]] = {
    "after_a_step": (True, False, True),
    "before_any_step": (False, True, False),
}

FROM_CONSTRUCTION = (False, True, True)  # the plan of an expert that is frozen when the engine is built


def make_freezing_scenarios() -> dict[str, WindowScenario]:
    """Return a scenario for each plan and accumulation, in which an expert is frozen in some windows."""
    scenarios: dict[str, WindowScenario] = {}
    for name, plan in FREEZING_PLANS.items():
        scenario = WindowScenario(make_freezing_script(plan), windows=len(plan))
        scenarios |= {name: scenario, f"{name}_2_by_engine": make_accumulated(scenario, "2_by_engine")}
    late = WindowScenario(make_freezing_script(FROM_CONSTRUCTION), frozen_at_start=(f"experts.{TRAINED}",))
    return scenarios | {f"from_construction_{name}": make_accumulated(late, name) for name in ("1", "2_by_engine")}


def make_freezing_script(plan: tuple[bool, ...]) -> WindowScript:
    """Return a script that uses every expert in every accumulation window.

    One expert is frozen in the windows for which ``plan`` is false.
    """

    def train(participant: Participant, window: int, micro: int) -> None:
        """Train one micro-batch. Before the first forward of an accumulation window, freeze or unfreeze the expert."""
        if micro == 0:
            participant.module.experts[TRAINED].requires_grad_(plan[window])
        train_route(participant, window + len(plan) * micro, ALL_EXPERTS)

    return train


WHOLE_STEP = WindowScenario(train_window_route, windows=len(ROUTES))

LAWS = (
    window_law(
        "idle.whole_step",
        {
            "": WHOLE_STEP,
            "discarded": WindowScenario(train_after_discarding, windows=2),
            "norm": replace(WHOLE_STEP, clip=NEVER_CLIPS),
            **{name: make_accumulated(WHOLE_STEP, name) for name in ("2_by_engine", "2_by_caller")},
        },
        "a step does not move a weight that none of its micro-batches used, even if earlier steps used the weight",
        kept_because="the only law that compares weights after steps of plain SGD that use fewer and fewer of them",
    ),
    window_law(
        "idle.zeroed_in_place",
        {"": WindowScenario(train_window_route, windows=len(ROUTES), after_step=zero_by_module)},
        "calling module.zero_grad(set_to_none=False) in addition to the engine's zero_grad changes no later step",
        kept_because="the only law in which the caller leaves gradients of zeros on the parameters",
    ),
    window_law(
        "idle.frozen",
        make_freezing_scenarios(),
        "a weight that is frozen after construction does not move, and moves again once it is unfrozen",
        features=(Feature.UNFREEZING,),
        kept_because="the only law that makes a step while a trained weight is frozen",
    ),
)
