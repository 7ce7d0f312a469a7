"""Name the outcome of a record in one word, and determine the exit code for several records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from zharness.run.record import Record, Verdict

Key = TypeVar("Key")

# The most serious outcome is first: a square of the matrix that sums up several cells shows outcomes in this order.
OUTCOME_ORDER = (
    "stale",
    "error",
    "fail",
    "crash",
    "hang",
    "undetermined",
    "leak",
    "excused",
    "contract",
    "unsupported",
    "pass",
)


def outcome_name(record: Record) -> str:
    """Return ``stale`` or ``excused`` if an expected failure covers ``record``, else the verdict of ``record``.

    A cell that failed on pooled ranks and had an expected outcome on fresh ranks is a ``leak``: an earlier cell left
    state behind.
    """
    if record.stale_reason:
        return "stale"
    if record.pool_difference and replace(record, pool_difference="").is_expected:
        return "leak"
    if record.expected_failure and record.verdict.is_broken:
        return "excused"
    return record.verdict.value


def count_cells(number: int) -> str:
    """Return ``1 cell``, or ``2 cells``."""
    return f"{number} cell" if number == 1 else f"{number} cells"


def count_outcomes(records: Iterable[Record]) -> dict[str, int]:
    """Count the records of each outcome; the most serious outcome comes first."""
    outcomes = [outcome_name(record) for record in records]
    return {outcome: outcomes.count(outcome) for outcome in OUTCOME_ORDER if outcome in outcomes}


def group_records(records: Iterable[Record], get_key: Callable[[Record], Key]) -> dict[Key, list[Record]]:
    """Group records by ``get_key(record)``; groups and records keep the order of ``records``."""
    groups: dict[Key, list[Record]] = {}
    for record in records:
        groups.setdefault(get_key(record), []).append(record)
    return groups


def records_exit_code(records: Sequence[Record]) -> int:
    """Return 0 if every record is as expected, 3 if the harness itself failed in a cell, else 1."""
    if any(record.verdict is Verdict.ERROR for record in records):
        return 3
    return 0 if all(record.is_expected for record in records) else 1
