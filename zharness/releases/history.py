"""Compare cells over releases: find where a law starts or stops holding, and which cells changed between runs."""

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
    """The records of one release by cell; the cells name the engine without its release.

    ``failure_reason`` is a sentence that explains why there are no records; it is empty if there are records.
    """

    engine: str
    release: str
    records: Mapping[Cell, Record]
    failure_reason: str = ""


@dataclass(frozen=True)
class Flip:
    """A change of a law's status: the law holds on one of two consecutive judged releases and is broken on the other.

    ``before`` and ``after`` are the records of ``cell`` on the older and the newer release.
    """

    cell: Cell
    before: Record
    after: Record


def request_for_engine(request: Request, engine: str) -> Request:
    """Return a copy of ``request`` for another engine, in which cell ids among the patterns name that engine."""
    patterns = tuple(
        replace(Cell.parse(pattern), engine=engine).id if is_cell_id(pattern) else pattern
        for pattern in request.patterns
    )
    return replace(request, patterns=patterns, engines=(engine,))


def run_release(engine: str, request: Request, run_request: RunRequest) -> ReleaseRecords:
    """Run ``request`` on one release, and return the records or the reason why there are none."""
    try:
        records = run_request(request_for_engine(request, engine))
    except UsageError as error:
        return ReleaseRecords(engine, split_release(engine)[1] or engine, {}, str(error))
    release = records[0].engine_version if records else split_release(engine)[1] or engine
    return ReleaseRecords(engine, release, {strip_release(record.cell): record for record in records})


def run_releases(release_engines: Iterable[str], request: Request, run_request: RunRequest) -> list[ReleaseRecords]:
    """Run ``request`` on the releases one after the other. Raises UsageError if none of them can be run."""
    columns = [run_release(engine, request, run_request) for engine in release_engines]
    if all(column.failure_reason for column in columns):
        raise UsageError("; ".join(dict.fromkeys(column.failure_reason for column in columns)))
    return columns


def list_cells(columns: Iterable[ReleaseRecords]) -> list[Cell]:
    """Return all cells that have a record on at least one release, in the order of the records."""
    return list(dict.fromkeys(cell for column in columns for cell in column.records))


def find_flips(columns: Sequence[ReleaseRecords]) -> Iterator[Flip]:
    """Yield each change of a law between holding and broken on consecutive judged releases, cell by cell."""
    for cell in list_cells(columns):
        records = [column.records[cell] for column in columns if cell in column.records]
        records = [record for record in records if law_status(record) is not LawStatus.UNKNOWN]
        for before, after in itertools.pairwise(records):
            if law_status(before) is not law_status(after):
                yield Flip(cell, before, after)


def find_changes(before: Mapping[Cell, Record], after: Mapping[Cell, Record]) -> list[Change]:
    """Return how the cells that are in both runs changed from ``before`` to ``after``."""
    found = []
    for cell, now in after.items():
        if cell in before:
            kind = classify_change(before[cell], now)
            if kind is not None:
                found.append(Change(kind, before[cell], now))
    return found


def describe_overlap(before: Mapping[Cell, Record], after: Mapping[Cell, Record]) -> str:
    """Return a text with the numbers of cells that are in both runs, only in ``before`` and only in ``after``.

    Raises UsageError if no cell is in both runs.
    """
    both = len(before.keys() & after.keys())
    if not both:
        raise UsageError(
            f"nothing was compared: the {len(before)} cells of the earlier run and the {len(after)} of this run "
            "have none in common; "
            "pass the same laws, stages, world sizes, meshes, dtypes and models as in the earlier run"
        )
    return f"{both} cells compared, {len(before) - both} only before, {len(after) - both} only now"


def group_by_release(records: Iterable[Record], engine: str) -> dict[str, dict[Cell, Record]]:
    """Group the records of ``engine`` by release and cell; a later record of the same cell replaces an earlier one.

    Raises UsageError if there are no records of ``engine``.
    """
    found: dict[str, dict[Cell, Record]] = {}
    for record in records:
        if split_release(record.cell.engine)[0] == engine:
            found.setdefault(record.engine_version, {})[strip_release(record.cell)] = record
    if not found:
        raise UsageError(
            f"the earlier run has no cell of {engine}; record one with: zharness releases {engine} ... --jsonl FILE"
        )
    return found
