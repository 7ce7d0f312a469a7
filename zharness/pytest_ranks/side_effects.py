"""Define the effects of a test on a rank beyond its reports, and apply them in the pytest process."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from zharness.world import GroupOutcome, RankEnd


@dataclass(frozen=True)
class SessionStop:
    """The request of a test to stop the whole session, made with ``pytest.exit`` or a KeyboardInterrupt."""

    rank: int
    trigger: str  # "exit" or "keyboard"
    reason: str
    returncode: int | None


@dataclass(frozen=True)
class RecordedWarning:
    """A warning that pytest recorded on a rank, stored so that it can be pickled."""

    category: type[Warning]
    message: str
    filename: str
    line: int
    when: str
    location: tuple[str, int, str] | None


@dataclass(frozen=True)
class RankSideEffects:
    """The effects of one test on one rank that the phase reports do not contain.

    ``leftovers`` describes threads and processes that the test did not end. ``changed_state`` names process-wide
    settings that the test changed.
    """

    recorded_warnings: tuple[RecordedWarning, ...] = ()
    leftovers: tuple[str, ...] = ()
    changed_state: str = ""
    stop: SessionStop | None = None
    benchmarks: tuple[bytes, ...] = ()  # the results of pytest-benchmark, pickled
    allure_results: tuple[bytes, ...] = ()  # the allure data of the test, pickled


def iter_side_effects(outcome: GroupOutcome) -> Iterator[tuple[int, RankSideEffects]]:
    """Yield the number of each rank that returned from the test, with the side effects that the rank reported."""
    for rank in outcome.ranks:
        if rank.end is RankEnd.RETURNED and rank.payload:
            yield rank.rank, rank.value


def add_leftovers(outcome: GroupOutcome, side_effects: dict[int, RankSideEffects]) -> GroupOutcome:
    """Return ``outcome`` with the threads and processes that each rank left behind, from the rank's side effects."""
    return replace(
        outcome,
        ranks=tuple(
            replace(rank, leftovers=side_effects[rank.rank].leftovers) if rank.rank in side_effects else rank
            for rank in outcome.ranks
        ),
    )


def find_session_stop(outcome: GroupOutcome) -> SessionStop | None:
    """Return the earliest request of a rank to stop the session, or None."""
    notes = sorted((note for rank in outcome.ranks for note in rank.notes), key=lambda note: note.at_ns)
    payloads: Iterator[Any] = (pickle.loads(note.payload) for note in notes)  # noqa: S301 - written by our own ranks
    return next((payload for payload in payloads if isinstance(payload, SessionStop)), None)


def stop_session(stop: SessionStop) -> None:
    """End the pytest session as a rank requested: raise KeyboardInterrupt or pytest.exit.Exception."""
    if stop.trigger == "keyboard":
        raise KeyboardInterrupt(f"rank {stop.rank}: {stop.reason}")
    pytest.exit(f"rank {stop.rank}: {stop.reason}", returncode=stop.returncode)


def replay_warning(item: pytest.Item, warning: RecordedWarning) -> None:
    """Pass a warning that a rank recorded to the hook ``pytest_warning_recorded`` of the pytest process."""
    message = warnings.WarningMessage(
        warning.category(warning.message), warning.category, warning.filename, warning.line
    )
    kwargs = {"warning_message": message, "nodeid": item.nodeid, "when": warning.when, "location": warning.location}
    item.ihook.pytest_warning_recorded.call_historic(kwargs=kwargs)
