"""Render the matrix of laws x stages, with one table for each engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tabulate import tabulate

from zharness.report.engine_names import name_engines
from zharness.run.outcomes import count_outcomes, group_records
from zharness.run.record import Record


def render_square(records: Sequence[Record]) -> str:
    """Render the number of each outcome in one square of the matrix, as in ``fail 1, pass 5``."""
    return ", ".join(f"{outcome} {count}" for outcome, count in count_outcomes(records).items())


def render_matrix(records: Iterable[Record], tablefmt: str = "simple") -> str:
    """Render one table for each engine and release: a row for each law, a column for each stage, world size and dtype.

    The table of a run with a covering array has a column for each stage. ``tablefmt`` is a table format of the package
    tabulate.
    """
    records = list(records)
    names = name_engines(records)
    blocks = group_records(
        records, lambda record: (names.get(record.cell.engine_label, record.cell.engine_label), record.engine_version)
    )
    return "\n\n".join(
        render_engine_table(engine, version, rows, tablefmt) for (engine, version), rows in blocks.items()
    )


def render_engine_table(engine: str, version: str, records: Sequence[Record], tablefmt: str) -> str:
    """Render the table of one engine below a line with its name and version."""
    is_array = len({record.cell.engine_label for record in records}) > 1
    get_column = stage_column if is_array else matrix_column
    columns = sorted({get_column(record) for record in records})
    head = [describe_column(column) for column in columns]
    body = [
        [law, *(render_square([r for r in rows if get_column(r) == column]) for column in columns)]
        for law, rows in group_records(records, lambda record: record.cell.law).items()
    ]
    gap = "\n" if tablefmt == "simple" else "\n\n"  # Markdown would join a line right above a table to the table
    return f"{engine} {version}{gap}" + tabulate(body, ["law", *head], tablefmt=tablefmt)


def matrix_column(record: Record) -> tuple[int, int, str]:
    """Return the column of a record: its stage, world size and dtype."""
    return record.cell.stage, record.cell.world_size, record.cell.dtype


def stage_column(record: Record) -> tuple[int, int, str]:
    """Return the column of a record in a run with a covering array, which is the record's stage alone."""
    return record.cell.stage, 0, ""


def describe_column(column: tuple[int, int, str]) -> str:
    """Return the header text of a column."""
    stage, world_size, dtype = column
    return f"stage {stage}, {world_size} ranks, {dtype}" if world_size else f"stage {stage}"
