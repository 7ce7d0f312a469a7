"""Compare the records of one cell from two runs: find out whether the law holds in each run, and what changed."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum

from zharness.cell import Cell
from zharness.engines.registry import split_release
from zharness.run.record import Record, Verdict

_FOLDER = re.compile(r"(?:/[^\s:/'\"]+)+/")
_NUMBER = re.compile(r"0x[0-9a-f]+|-?\d[\d.]*(?:e[+-]?\d+)?")


class LawStatus(Enum):
    """The status of a record's law, regardless of expected failures: the law of an excused failure is BROKEN."""

    HOLDS = "holds"
    BROKEN = "broken"
    UNKNOWN = "unknown"  # not run, failed in the harness, or undetermined


class ChangeKind(Enum):
    """The kinds of changes of a cell between two runs."""

    NEWLY_BROKEN = "newly broken"
    NEW_FAILURE = "new failure"  # broken now, unknown before
    HOLDS_AGAIN = "holds again"
    FAILS_DIFFERENTLY = "fails differently"
    INCONCLUSIVE = "no longer decided"


FAILURE_KINDS = (ChangeKind.NEWLY_BROKEN, ChangeKind.NEW_FAILURE)


@dataclass(frozen=True)
class Change:
    """A cell whose outcome changed between two runs."""

    kind: ChangeKind
    before: Record
    after: Record


def law_status(record: Record) -> LawStatus:
    """Return whether the law of ``record`` holds, is broken, or has an unknown status."""
    if record.verdict.is_broken:
        return LawStatus.BROKEN
    return LawStatus.HOLDS if record.verdict in (Verdict.PASS, Verdict.CONTRACT) else LawStatus.UNKNOWN


def failure_signature(record: Record) -> str:
    """Describe how a cell failed, without the numbers and folders that differ between runs and releases."""
    first = record.cause.partition("\n")[0]
    return f"{record.verdict.value}: {_NUMBER.sub('#', _FOLDER.sub('', first))}"


def strip_release(cell: Cell) -> Cell:
    """Return ``cell`` with the release removed from its engine's name, so that cells of two releases compare equal."""
    return replace(cell, engine=split_release(cell.engine)[0])


def classify_change(before: Record, after: Record) -> ChangeKind | None:
    """Return how one cell changed from the record ``before`` to the record ``after``, or None if it did not change.

    The result is also None if the law holds now and its status was unknown before. Two failures with the same signature
    do not count as a change.
    """
    was, now = law_status(before), law_status(after)
    if was is now:
        is_unchanged = was is not LawStatus.BROKEN or failure_signature(before) == failure_signature(after)
        return None if is_unchanged else ChangeKind.FAILS_DIFFERENTLY
    if was is LawStatus.UNKNOWN:
        return ChangeKind.NEW_FAILURE if now is LawStatus.BROKEN else None
    return {
        LawStatus.BROKEN: ChangeKind.NEWLY_BROKEN,
        LawStatus.HOLDS: ChangeKind.HOLDS_AGAIN,
        LawStatus.UNKNOWN: ChangeKind.INCONCLUSIVE,
    }[now]
