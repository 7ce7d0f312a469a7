"""Define what a rank sends to the pytest process about a test: the report of a phase, and a note on an example."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PHASES = ("setup", "call", "teardown")


@dataclass(frozen=True)
class PhaseReport:
    """The report of one ``phase`` of a test as plain data.

    ``report`` is what pytest's hook ``pytest_report_to_serializable`` returned on the rank.
    """

    phase: str
    report: dict[str, Any]


@dataclass(frozen=True)
class ExampleNote:
    """The error of a rank in a Hypothesis example that other ranks have not ended.

    ``example`` is the text of the drawn arguments. ``error`` is empty once all ranks have ended the example.
    """

    example: str
    error: str
    traceback: str
