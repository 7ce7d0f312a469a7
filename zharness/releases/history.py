"""Cells over releases: where each flipped, and what changed since an earlier record."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zharness.cell import Cell, is_cell_id
from zharness.engines.registry import split_release
from zharness.errors import UsageError
from zharness.run import Record, Request
from zharness.run.changes import Change, LawStatus, classify_change, law_status, strip_release

RunRequest = Callable[[Request], list[Record]]


@dataclass(frozen=True)
class ReleaseRecords:
    """One release: its records by their cases, in which the engine's name has no release.

    ``trouble`` says in one sentence why there are none.
    """

    engine: str
    release: str
    records: Mapping[Cell, Record]
    failure_reason: str = ""


@dataclass(frozen=True)
class Flip:
    """A cell whose law holds on one of two neighbouring releases, of those that tell, and is broken on the other."""

    case: Cell
    before: Record
    after: Record


def request_for_engine(request: Request, engine: str) -> Request:
    """``request`` for the engine ``text``; whole case ids among its patterns are moved to that engine."""
    patterns = tuple(
        replace(Cell.parse(pattern), engine=engine).id if is_cell_id(pattern) else pattern
        for pattern in request.patterns
    )
    return replace(request, patterns=patterns, engines=(engine,))


def run_release(engine: str, request: Request, run_request: RunRequest) -> ReleaseRecords:
    """The records of one release, or why there are none."""
    try:
        records = run_request(request_for_engine(request, engine))
    except UsageError as trouble:
        return ReleaseRecords(engine, split_release(engine)[1] or engine, {}, str(trouble))
    return ReleaseRecords(engine, records[0].engine_version, {strip_release(record.cell): record for record in records})


def run_releases(release_engines: Iterable[str], request: Request, run_request: RunRequest) -> list[ReleaseRecords]:
    """One column for each release, one release after the other. Raises UsageError when none can be run."""
    found = [run_release(text, request, run_request) for text in release_engines]
    if all(each.failure_reason for each in found):
        raise UsageError("; ".join(dict.fromkeys(each.failure_reason for each in found)))
    return found


def list_cells(columns: Iterable[ReleaseRecords]) -> list[Cell]:
    """Every cell of any column, in the order of the matrix."""
    return list(dict.fromkeys(case for each in columns for case in each.records))


def find_flips(columns: Sequence[ReleaseRecords]) -> Iterator[Flip]:
    """Every place where a cell's law begins or ceases to hold, cell by cell."""
    for case in list_cells(columns):
        told = [each.records[case] for each in columns if case in each.records]
        told = [record for record in told if law_status(record) is not LawStatus.UNKNOWN]
        for before, after in itertools.pairwise(told):
            if law_status(before) is not law_status(after):
                yield Flip(case, before, after)


def find_changes(before: Mapping[Cell, Record], after: Mapping[Cell, Record]) -> list[Change]:
    """What changed in the cells that both have."""
    found = []
    for case, now in after.items():
        if case in before:
            kind = classify_change(before[case], now)
            if kind is not None:
                found.append(Change(kind, before[case], now))
    return found


def describe_overlap(before: Mapping[Cell, Record], after: Mapping[Cell, Record]) -> str:
    """How many cells both have and each has alone, in words. Raises UsageError where they share none."""
    both = len(before.keys() & after.keys())
    if not both:
        raise UsageError(
            f"nothing was compared: of {len(before)} cells before and {len(after)} now none is the same; "
            "name the same checks, stages, world sizes, dtypes and models as before"
        )
    return f"{both} cells compared, {len(before) - both} only before, {len(after) - both} only now"


def group_by_release(records: Iterable[Record], engine: str) -> dict[str, dict[Cell, Record]]:
    """An earlier run by release, the latest line of a cell in force. Raises UsageError without any cell of ``name``."""
    found: dict[str, dict[Cell, Record]] = {}
    for record in records:
        if split_release(record.cell.engine)[0] == engine:
            found.setdefault(record.engine_version, {})[strip_release(record.cell)] = record
    if not found:
        raise UsageError(
            f"the record has no cell of {engine}; write one with: zharness releases {engine} ... --jsonl FILE"
        )
    return found
