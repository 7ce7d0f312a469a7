"""One cell in two runs: whether its law holds in each, and how it changed."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum

from zharness.case import Case
from zharness.engines.registry import split
from zharness.run.record import Record, Verdict

_PLACE = re.compile(r"(?:/[^\s:/'\"]+)+/")
_NUMBER = re.compile(r"0x[0-9a-f]+|-?\d[\d.]*(?:e[+-]?\d+)?")


class Standing(Enum):
    """What a record says of its law. An excuse changes nothing here: it says what is expected, not what is."""

    HOLDS = "holds"
    BROKEN = "broken"
    UNKNOWN = "unknown"  # not run, or nothing was shown


class Kind(Enum):
    """How a cell changed."""

    BROKEN = "newly broken"
    NEW = "new failure"  # broken where nothing was shown before
    HOLDS = "holds again"
    OTHERWISE = "fails otherwise"
    LOST = "shows nothing any more"


FAILURES = (Kind.BROKEN, Kind.NEW)


@dataclass(frozen=True)
class Change:
    """A cell that is not what it was."""

    kind: Kind
    before: Record
    after: Record


def standing(record: Record) -> Standing:
    """Whether the law of ``record`` holds."""
    if record.verdict.broken:
        return Standing.BROKEN
    return Standing.HOLDS if record.verdict in (Verdict.PASS, Verdict.CONTRACT) else Standing.UNKNOWN


def signature(record: Record) -> str:
    """How a cell failed, without what differs from run to run and from release to release: numbers and folders."""
    first = record.cause.partition("\n")[0]
    return f"{record.verdict.value}: {_NUMBER.sub('#', _PLACE.sub('', first))}"


def bare(case: Case) -> Case:
    """``case`` with the engine's name alone, so that releases can be laid side by side."""
    return replace(case, engine=split(case.engine)[0])


def changed(before: Record, after: Record) -> Kind | None:
    """How one cell changed; None where it did not, or where the earlier record tells nothing and the law holds."""
    was, now = standing(before), standing(after)
    if was is now:
        alike = was is not Standing.BROKEN or signature(before) == signature(after)
        return None if alike else Kind.OTHERWISE
    if was is Standing.UNKNOWN:
        return Kind.NEW if now is Standing.BROKEN else None
    return {Standing.BROKEN: Kind.BROKEN, Standing.HOLDS: Kind.HOLDS, Standing.UNKNOWN: Kind.LOST}[now]
