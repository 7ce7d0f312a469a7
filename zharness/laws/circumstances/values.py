"""Define the laws of the group ``values``: gradients that are zero, infinite or NaN, and norms of tiny parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from zharness.engines.protocol import Feature
from zharness.law_kit.scenarios import NamedTensors, Participant
from zharness.law_kit.window_law import window_law
from zharness.law_kit.window_scenarios import WindowScenario, WindowScript
from zharness.laws.circumstances.common import ALL_EXPERTS, make_accumulated, sum_loss, train_route, train_whole_model

WINDOWS = 2  # clipping rounds weights, so only the last step of a scenario may clip
ZERO_WINDOW = 0  # the window whose losses are zero
NEVER_ZERO = 0.5  # added to an integer loss: only a loss that the script multiplies by 0 is then zero
CLIP = 4.0  # far below the norm of every window's gradient, so that it clips


def make_zero_script(on_all_ranks: bool) -> WindowScript:
    """Return a script in which the losses of one accumulation window are zero on rank 0, or on all ranks."""

    def train(participant: Participant, window: int, micro: int) -> NamedTensors:
        """Train one micro-batch, and return its loss."""
        batch = participant.get_batch(window + WINDOWS * micro)
        factor = 0 if window == ZERO_WINDOW and (on_all_ranks or participant.rank == 0) else 1
        loss = factor * (sum_loss(participant.call(batch.inputs), batch.target) + NEVER_ZERO)
        participant.backward(loss)
        return {"loss": loss}

    return train


def train_with_zero_first(participant: Participant, window: int, micro: int) -> None:
    """Train one micro-batch; on rank 0 the loss of the first one of each accumulation window is zero."""
    batch = participant.get_batch(window + WINDOWS * micro)
    factor = 0 if micro == 0 and participant.rank == 0 else 1
    participant.backward(factor * (sum_loss(participant.call(batch.inputs), batch.target) + NEVER_ZERO))


ZERO_ON_ONE_RANK = WindowScenario(make_zero_script(on_all_ranks=False), WINDOWS)
ZERO_ON_ALL_RANKS = WindowScenario(make_zero_script(on_all_ranks=True), WINDOWS)

ZERO_SCENARIOS = {
    "one_rank": ZERO_ON_ONE_RANK,
    "all_ranks": ZERO_ON_ALL_RANKS,
    "one_rank_2_by_engine": make_accumulated(ZERO_ON_ONE_RANK, "2_by_engine"),
    "first_of_2_by_engine": make_accumulated(WindowScenario(train_with_zero_first, WINDOWS), "2_by_engine"),
    "all_ranks_clipped": replace(ZERO_ON_ALL_RANKS, clip=CLIP),
}

DISCARDED_BATCH = 8  # no window trains this micro-batch

NOT_FINITE: Mapping[str, float] = {"inf": torch.inf, "nan": torch.nan}


def make_discarding_script(value: float) -> WindowScript:
    """Return a script that discards gradients that are ``value`` on rank 0, and then trains an ordinary micro-batch."""

    def train(participant: Participant, window: int, micro: int) -> None:
        """Run backward of a loss that is not finite, zero the gradients, and train one micro-batch."""
        if window == 0 and micro == 0:
            batch = participant.get_batch(DISCARDED_BATCH)
            factor = value if participant.rank == 0 else 1.0
            participant.backward(factor * sum_loss(participant.call(batch.inputs), batch.target))
            participant.zero_grad()
        train_whole_model(participant, window, micro)

    return train


def make_discarding_scenarios() -> dict[str, WindowScenario]:
    """Return a scenario for each value that is not finite, with and without clipping and accumulation."""
    scenarios: dict[str, WindowScenario] = {}
    for name, value in NOT_FINITE.items():
        scenario = WindowScenario(make_discarding_script(value), WINDOWS)
        scenarios[name] = scenario
        scenarios[f"{name}_clipped"] = replace(scenario, windows=1, clip=CLIP)
        scenarios[f"{name}_2_by_engine"] = make_accumulated(scenario, "2_by_engine")
    return scenarios


CLIPPED = WindowScenario(train_whole_model, 1, clip=CLIP)


def train_after_discarding_inside(participant: Participant, window: int, micro: int) -> None:
    """Train one micro-batch; before a window's first one, discard another one's gradients inside ``no_sync``."""
    if micro == 0:
        train_route(participant, DISCARDED_BATCH, ALL_EXPERTS)
        participant.zero_grad()
    train_whole_model(participant, window, micro)


DISCARDED_BATCH = 16  # no window trains this micro-batch
DISCARDED_IN_NO_SYNC = replace(
    make_accumulated(WindowScenario(train_after_discarding_inside, windows=2), "2_by_caller"), in_no_sync=True
)


def train_less_after_discarding(participant: Participant, window: int, micro: int) -> None:
    """Train one micro-batch without the last expert, which only a discarded micro-batch of the window has used."""
    if micro == 0:
        train_route(participant, DISCARDED_BATCH, ALL_EXPERTS)
        participant.zero_grad()
    train_route(participant, 2 * window + micro, ALL_EXPERTS[:-1])


IN_NO_SYNC = {
    "in_no_sync": DISCARDED_IN_NO_SYNC,
    "idle_in_no_sync": replace(DISCARDED_IN_NO_SYNC, train=train_less_after_discarding),
}

LAWS = (
    window_law(
        "values.zero_loss",
        ZERO_SCENARIOS,
        "a loss of exactly zero, on one rank or on all, counts as a loss whose gradients are zero",
        kept_because="the only gradients that are zero although every weight was used",
    ),
    window_law(
        "values.discarded",
        make_discarding_scenarios() | IN_NO_SYNC,
        "gradients that zero_grad discards, also infinite ones or ones from no_sync, change no later step or norm",
        kept_because="the only discarded gradients that are not finite in fp32: zero times such a gradient is not zero",
    ),
    window_law(
        "values.norm_of_tiny",
        {"": CLIPPED, "2_by_engine": make_accumulated(CLIPPED, "2_by_engine")},
        "a parameter with fewer elements than there are ranks counts once in the norm, and is clipped like the rest",
        features=(Feature.CLIP,),
        kept_because="the only clipped parameter of which some ranks own no element",
    ),
)
