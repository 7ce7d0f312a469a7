"""What a rank tells of one phase of its test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PHASES = ("setup", "call", "teardown")


@dataclass(frozen=True)
class PhaseReport:
    """The report of one ``phase``, made to travel by the hook pytest_report_to_serializable in the rank."""

    phase: str
    report: dict[str, Any]
