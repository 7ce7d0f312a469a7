"""Cells over releases: where each flipped, and what changed since an earlier record."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zharness.case import Case, looks_like_id
from zharness.engines.registry import split
from zharness.errors import UsageError
from zharness.run import Record, Request
from zharness.run.changes import Change, Standing, bare, changed, standing

Measure = Callable[[Request], list[Record]]


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


def recorded(records: Iterable[Record], name: str) -> dict[str, dict[Case, Record]]:
    """An earlier run by release, the latest line of a cell in force. Raises UsageError without any cell of ``name``."""
    found: dict[str, dict[Case, Record]] = {}
    for record in records:
        if split(record.case.engine)[0] == name:
            found.setdefault(record.engine_version, {})[bare(record.case)] = record
    if not found:
        raise UsageError(f"the record has no cell of {name}; write one with: zharness releases {name} ... --jsonl FILE")
    return found
