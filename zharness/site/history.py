"""Follow each cell of a law over the releases of an engine: when it broke, and when it was mended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from zharness.engines.registry import BUILT_IN, is_checkout
from zharness.run.changes import LawStatus, law_status, strip_release
from zharness.run.outcomes import group_records, outcome_name
from zharness.run.record import Record
from zharness.site.columns import Column, find_column, worst_record

QUIET_OUTCOMES = ("pass", "contract", "unsupported")


@dataclass(frozen=True)
class CellHistory:
    """One cell over the releases of its engine.

    ``name`` is the cell's id without its law and the engine's release. ``records`` has the worst record of the cell on
    each of the releases, or None where it was not run. ``events`` are sentences.
    """

    name: str
    records: tuple[Record | None, ...]
    events: tuple[str, ...]

    @property
    def failures(self) -> tuple[Record, ...]:
        """The records in which the law is broken, from the oldest release to the newest."""
        return tuple(record for record in self.records if record is not None and record.verdict.is_broken)

    @property
    def is_quiet(self) -> bool:
        """Whether the cell holds or is not supported on every release on which it was run."""
        return all(record is None or outcome_name(record) in QUIET_OUTCOMES for record in self.records)


@dataclass(frozen=True)
class EngineHistory:
    """The cells of one law on one engine; the quiet ones hold, or are not supported, on every release."""

    engine: str
    columns: tuple[Column, ...]
    striking: tuple[CellHistory, ...]
    quiet: tuple[CellHistory, ...]


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
            tuple(cell for cell in cells if not cell.is_quiet),
            tuple(cell for cell in cells if cell.is_quiet),
        )


def follow_cell(records: Sequence[Record], columns: Sequence[Column]) -> CellHistory:
    """Return the history of one cell. If it was run several times on one release, the worst record counts."""
    by_column = group_records(records, find_column)
    worst = tuple(worst_record(by_column[column]) if column in by_column else None for column in columns)
    id_ = strip_release(records[0].cell).id
    return CellHistory(id_.partition("[")[2].removesuffix("]"), worst, tuple(describe_events(worst, columns)))


def describe_events(records: Sequence[Record | None], columns: Sequence[Column]) -> Iterator[str]:
    """Say on which release a cell broke and on which it was mended, or that it is broken in all.

    Releases without a verdict are passed over, so each sentence names the last release before the change that has one.
    """
    before: tuple[LawStatus, Column] | None = None
    changes, releases = 0, 0
    for record, column in zip(records, columns, strict=True):
        status = LawStatus.UNKNOWN if record is None else law_status(record)
        if status is LawStatus.UNKNOWN:
            continue
        if before is not None and before[0] is not status:
            verb, was = ("broke", "held") if status is LawStatus.BROKEN else ("was mended", "was broken")
            yield f"{verb} in {column.release}, {was} in {before[1].release}"
            changes += 1
        before, releases = (status, column), releases + 1
    if before is not None and before[0] is LawStatus.BROKEN and not changes and releases > 1:
        yield f"broken in all {releases} releases"


def describe_command(record: Record) -> str:
    """Return the command that shows the record again, with the release that the record is about.

    Without a release, the command would run the installed one. A factory and the reference have none. Of the path of a
    checkout only the folder is left, because the path is one of the machine that ran the cell.
    """
    cell = record.cell
    if is_checkout(cell.engine):
        name, _, path = cell.engine.partition("@")
        return replace(record, cell=replace(cell, engine=f"{name}@{PurePath(path).name}")).command
    if cell.engine not in BUILT_IN or BUILT_IN[cell.engine].distribution == "zharness":
        return record.command
    release = record.engine_version.partition("+")[0]
    return replace(record, cell=replace(cell, engine=f"{cell.engine}=={release}")).command
