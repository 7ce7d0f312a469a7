"""Find the entry of the expected failures that explains a record of a site."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zharness.run.expected_failures import ExpectedFailure
from zharness.run.record import Record
from zharness.run.shipped_failures import expected_failures_for


def find_entry(
    record: Record, user_failures: Sequence[ExpectedFailure], explains: Callable[[ExpectedFailure], bool]
) -> ExpectedFailure | None:
    """Return the first entry that covers the cell of ``record`` and ``explains`` it, the user's entries first."""
    for entry in (*user_failures, *expected_failures_for(record.cell.engine)):
        if explains(entry) and entry.covers_cell(record.cell, record.engine_version):
            return entry
    return None
