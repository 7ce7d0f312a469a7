"""Cells over releases: where each flipped, and what changed since an earlier record."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from zharness.case import Case, looks_like_id
from zharness.engines.registry import split
from zharness.errors import UsageError
from zharness.run import Record, Request
from zharness.run.record import Verdict

Measure = Callable[[Request], list[Record]]

_PLACE = re.compile(r"(?:/[^\s:/'\"]+)+/")
_NUMBER = re.compile(r"0x[0-9a-f]+|-?\d[\d.]*(?:e[+-]?\d+)?")


class Standing(Enum):
    """What a record says of its law. An excuse changes nothing here: it says what is expected, not what is."""

    HOLDS = "holds"
    BROKEN = "broken"
    UNKNOWN = "unknown"  # not run, or nothing was shown


@dataclass(frozen=True)
class Column:
    """One release: its records by their cases, in which the engine's name has no release.

    ``trouble`` says in one sentence why there are none.
    """

    text: str
    release: str
    records: Mapping[Case, Record]
    trouble: str = ""


@dataclass(frozen=True)
class Flip:
    """A cell whose law holds on one of two neighbouring releases, of those that tell, and is broken on the other."""

    case: Case
    before: Record
    after: Record


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


def request_on(request: Request, text: str) -> Request:
    """``request`` for the engine ``text``; whole case ids among its patterns are moved to that engine."""
    patterns = tuple(
        replace(Case.parse(pattern), engine=text).id if looks_like_id(pattern) else pattern
        for pattern in request.patterns
    )
    return replace(request, patterns=patterns, engines=(text,))


def column(text: str, request: Request, measure: Measure) -> Column:
    """The records of one release, or why there are none."""
    try:
        records = measure(request_on(request, text))
    except UsageError as trouble:
        return Column(text, split(text)[1] or text, {}, str(trouble))
    return Column(text, records[0].engine_version, {bare(record.case): record for record in records})


def columns(texts: Iterable[str], request: Request, measure: Measure) -> list[Column]:
    """One column for each release, one release after the other. Raises UsageError when none can be run."""
    found = [column(text, request, measure) for text in texts]
    if all(each.trouble for each in found):
        raise UsageError("; ".join(dict.fromkeys(each.trouble for each in found)))
    return found


def cells(found: Iterable[Column]) -> list[Case]:
    """Every cell of any column, in the order of the matrix."""
    return list(dict.fromkeys(case for each in found for case in each.records))


def flips(found: Sequence[Column]) -> Iterator[Flip]:
    """Every place where a cell's law begins or ceases to hold, cell by cell."""
    for case in cells(found):
        told = [each.records[case] for each in found if case in each.records]
        told = [record for record in told if standing(record) is not Standing.UNKNOWN]
        for before, after in itertools.pairwise(told):
            if standing(before) is not standing(after):
                yield Flip(case, before, after)


def changes(before: Mapping[Case, Record], after: Mapping[Case, Record]) -> list[Change]:
    """What changed in the cells that both have."""
    found = []
    for case, now in after.items():
        if case in before:
            kind = changed(before[case], now)
            if kind is not None:
                found.append(Change(kind, before[case], now))
    return found


def shared(before: Mapping[Case, Record], after: Mapping[Case, Record]) -> str:
    """How many cells both have and each has alone, in words. Raises UsageError where they share none."""
    both = len(before.keys() & after.keys())
    if not both:
        raise UsageError(
            f"nothing was compared: of {len(before)} cells before and {len(after)} now none is the same; "
            "name the same checks, stages, world sizes, dtypes and models as before"
        )
    return f"{both} cells compared, {len(before) - both} only before, {len(after) - both} only now"


def changed(before: Record, after: Record) -> Kind | None:
    """How one cell changed; None where it did not, or where the earlier record tells nothing and the law holds."""
    was, now = standing(before), standing(after)
    if was is now:
        alike = was is not Standing.BROKEN or signature(before) == signature(after)
        return None if alike else Kind.OTHERWISE
    if was is Standing.UNKNOWN:
        return Kind.NEW if now is Standing.BROKEN else None
    return {Standing.BROKEN: Kind.BROKEN, Standing.HOLDS: Kind.HOLDS, Standing.UNKNOWN: Kind.LOST}[now]


def recorded(records: Iterable[Record], name: str) -> dict[str, dict[Case, Record]]:
    """An earlier run by release, the latest line of a cell in force. Raises UsageError without any cell of ``name``."""
    found: dict[str, dict[Case, Record]] = {}
    for record in records:
        if split(record.case.engine)[0] == name:
            found.setdefault(record.engine_version, {})[bare(record.case)] = record
    if not found:
        raise UsageError(f"the record has no cell of {name}; write one with: zharness releases {name} ... --jsonl FILE")
    return found
