"""Define the report of one phase of a test (setup, call or teardown), which a rank sends to the pytest process."""

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
