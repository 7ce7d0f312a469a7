"""Follow each cell of a law over the releases of an engine: when it broke, and when it was mended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from zharness.engines.registry import BUILT_IN, is_checkout
from zharness.run.changes import LawStatus, failure_signature, law_status, strip_release
from zharness.run.outcomes import group_records, outcome_name
from zharness.run.record import Record
from zharness.site.columns import Column, find_column, worst_record

QUIET_OUTCOMES = ("pass", "contract", "unsupported")


@dataclass(frozen=True)
class CellHistory:
    """One cell over the releases of its engine.

    ``name`` is the cell's id without its law and the engine's release. ``records`` has the worst record of the cell on
    each release, or None for a release on which the cell was not run. ``events`` are sentences.
    """

    name: str
    records: tuple[Record | None, ...]
    events: tuple[str, ...]

    @property
    def striking_records(self) -> tuple[Record, ...]:
        """The records that do not hold although the cell is supported, from the oldest release to the newest."""
        return tuple(each for each in self.records if each is not None and outcome_name(each) not in QUIET_OUTCOMES)


@dataclass(frozen=True)
class SharedCause:
    """Cells whose newest failure has the same outcome and, apart from numbers, the same cause; ``record`` is one."""

    record: Record
    cells: tuple[CellHistory, ...]


@dataclass(frozen=True)
class EngineHistory:
    """The cells of one law on one engine; quiet cells hold, or are not supported, on every release."""

    engine: str
    columns: tuple[Column, ...]
    striking: tuple[CellHistory, ...]
    quiet: tuple[CellHistory, ...]

    @property
    def causes(self) -> tuple[SharedCause, ...]:
        """The striking cells, grouped by the cause of the newest failure of each."""
        groups: dict[tuple[str, str], list[CellHistory]] = {}
        for cell in self.striking:
            newest = cell.striking_records[-1]
            key = outcome_name(newest), newest.stale_reason or failure_signature(newest)
            groups.setdefault(key, []).append(cell)
        return tuple(SharedCause(cells[0].striking_records[-1], tuple(cells)) for cells in groups.values())


def follow_law(records: Sequence[Record], columns: Sequence[Column]) -> Iterator[EngineHistory]:
    """Yield the history of one law on each engine that ran it."""
    for engine, found in group_records(records, lambda record: find_column(record).engine).items():
        ran = {find_column(record) for record in found}
        own_columns = tuple(column for column in columns if column in ran)
        by_cell = group_records(found, lambda record: strip_release(record.cell))
        cells = [follow_cell(group, own_columns) for group in by_cell.values()]
        yield EngineHistory(
            engine,
            own_columns,
            tuple(cell for cell in cells if cell.striking_records),
            tuple(cell for cell in cells if not cell.striking_records),
        )


def follow_cell(records: Sequence[Record], columns: Sequence[Column]) -> CellHistory:
    """Return the history of one cell. If it was run several times on one release, the worst record counts."""
    by_column = group_records(records, find_column)
    worst = tuple(worst_record(by_column[column]) if column in by_column else None for column in columns)
    id_ = strip_release(records[0].cell).id
    return CellHistory(id_.partition("[")[2].removesuffix("]"), worst, tuple(describe_events(worst, columns)))


def describe_events(records: Sequence[Record | None], columns: Sequence[Column]) -> Iterator[str]:
    """Yield sentences on the releases on which a cell broke or was mended, or a sentence that it is broken in all.

    Releases without a verdict are skipped, so each sentence names the last release with a verdict before the change.
    """
    before: tuple[LawStatus, str] | None = None
    changes, releases = 0, 0
    for record, release in zip(records, name_releases(columns), strict=True):
        status = LawStatus.UNKNOWN if record is None else law_status(record)
        if status is LawStatus.UNKNOWN:
            continue
        if before is not None and before[0] is not status:
            verb, was = ("broke", "held") if status is LawStatus.BROKEN else ("was mended", "was broken")
            yield f"{verb} in {release}, {was} in {before[1]}"
            changes += 1
        before, releases = (status, release), releases + 1
    if before is not None and before[0] is LawStatus.BROKEN and not changes and releases > 1:
        yield f"broken in all {releases} releases"


def name_releases(columns: Sequence[Column]) -> list[str]:
    """Name the releases of one engine; add the release of torch if a version was run with several releases of torch."""
    versions = [column.version for column in columns]
    return [column.version if versions.count(column.version) == 1 else column.release for column in columns]


def describe_command(record: Record) -> str:
    """Return the command that runs the cell of the record again, on the release that the record is about.

    Without a release, the command would run the installed release. A factory and the reference have no release. Of the
    path of a checkout, only the last folder is kept, because the path belongs to the machine that ran the cell.
    """
    cell = record.cell
    if is_checkout(cell.engine):
        name, _, path = cell.engine.partition("@")
        return replace(record, cell=replace(cell, engine=f"{name}@{PurePath(path).name}")).command
    if cell.engine not in BUILT_IN or BUILT_IN[cell.engine].distribution == "zharness":
        return record.command
    release = record.engine_version.partition("+")[0]
    return replace(record, cell=replace(cell, engine=f"{cell.engine}=={release}")).command
