"""Define the messages on a test from a rank to the pytest process: the report of a phase, and a note on an example."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zharness.world.messages import RankStatus

if TYPE_CHECKING:
    from zharness.pytest_ranks.example_verdict import ExampleVerdict
    from zharness.pytest_ranks.known_examples import KnownExample

PHASES = ("setup", "call", "teardown")


@dataclass(frozen=True)
class PhaseReport:
    """The report of one ``phase`` of a test as plain data.

    ``report`` is the value that pytest's hook ``pytest_report_to_serializable`` returned on the rank.
    """

    phase: str
    report: dict[str, Any]


@dataclass(frozen=True)
class ExampleNote:
    """The verdict of a rank on a Hypothesis example that other ranks have not ended.

    ``status`` says how the rank has ended the example; it is OK once all ranks have ended it. ``error`` is the text of
    the rank's exception, or empty. ``key`` identifies the example, and ``choices_before`` are the values that were
    drawn before the test's body began. ``ended_examples`` are the earlier examples that ran on these ranks.
    """

    status: RankStatus
    verdict: ExampleVerdict
    key: str
    choices_before: str
    error: str
    ended_examples: tuple[KnownExample, ...] = ()
