"""One cell in two runs: whether its law holds in each, and how it changed."""

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
    """What a record says of its law. An excuse changes nothing here: it says what is expected, not what is."""

    HOLDS = "holds"
    BROKEN = "broken"
    UNKNOWN = "unknown"  # not run, or nothing was shown


class ChangeKind(Enum):
    """How a cell changed."""

    NEWLY_BROKEN = "newly broken"
    NEW_FAILURE = "new failure"  # broken where nothing was shown before
    HOLDS_AGAIN = "holds again"
    FAILS_DIFFERENTLY = "fails otherwise"
    INCONCLUSIVE = "shows nothing any more"


FAILURE_KINDS = (ChangeKind.NEWLY_BROKEN, ChangeKind.NEW_FAILURE)


@dataclass(frozen=True)
class Change:
    """A cell that is not what it was."""

    kind: ChangeKind
    before: Record
    after: Record


def law_status(record: Record) -> LawStatus:
    """Whether the law of ``record`` holds."""
    if record.verdict.is_broken:
        return LawStatus.BROKEN
    return LawStatus.HOLDS if record.verdict in (Verdict.PASS, Verdict.CONTRACT) else LawStatus.UNKNOWN


def failure_signature(record: Record) -> str:
    """How a cell failed, without what differs from run to run and from release to release: numbers and folders."""
    first = record.cause.partition("\n")[0]
    return f"{record.verdict.value}: {_NUMBER.sub('#', _FOLDER.sub('', first))}"


def strip_release(cell: Cell) -> Cell:
    """``case`` with the engine's name alone, so that releases can be laid side by side."""
    return replace(cell, engine=split_release(cell.engine)[0])


def classify_change(before: Record, after: Record) -> ChangeKind | None:
    """How one cell changed; None where it did not, or where the earlier record tells nothing and the law holds."""
    was, now = law_status(before), law_status(after)
    if was is now:
        alike = was is not LawStatus.BROKEN or failure_signature(before) == failure_signature(after)
        return None if alike else ChangeKind.FAILS_DIFFERENTLY
    if was is LawStatus.UNKNOWN:
        return ChangeKind.NEW_FAILURE if now is LawStatus.BROKEN else None
    return {
        LawStatus.BROKEN: ChangeKind.NEWLY_BROKEN,
        LawStatus.HOLDS: ChangeKind.HOLDS_AGAIN,
        LawStatus.UNKNOWN: ChangeKind.INCONCLUSIVE,
    }[now]
