"""The matrix of laws x stages, one block for each engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tabulate import tabulate

from zharness.run.outcomes import count_outcomes, group_records
from zharness.run.record import Record


def render_square(records: Sequence[Record]) -> str:
    """Render the records of one square of the matrix, as in ``fail 1, pass 5``."""
    return ", ".join(f"{outcome} {count}" for outcome, count in count_outcomes(records).items())


def render_matrix(records: Iterable[Record], tablefmt: str = "simple") -> str:
    """Render one table for each engine and release: a row for each law, a column for each stage, world size and dtype.

    ``tablefmt`` is a table format of the package tabulate.
    """
    blocks = group_records(records, lambda record: (record.cell.engine_label, record.engine_version))
    return "\n\n".join(
        render_engine_table(engine, version, rows, tablefmt) for (engine, version), rows in blocks.items()
    )


def render_engine_table(engine: str, version: str, records: Sequence[Record], tablefmt: str) -> str:
    """Render the table of one engine below a line with its name and version."""
    columns = sorted({matrix_column(record) for record in records})
    head = [f"stage {stage}, {world_size} ranks, {dtype}" for stage, world_size, dtype in columns]
    body = [
        [law, *(render_square([r for r in rows if matrix_column(r) == column]) for column in columns)]
        for law, rows in group_records(records, lambda record: record.cell.law).items()
    ]
    gap = "\n" if tablefmt == "simple" else "\n\n"  # Markdown would join a line right above a table to the table
    return f"{engine} {version}{gap}" + tabulate(body, ["law", *head], tablefmt=tablefmt)


def matrix_column(record: Record) -> tuple[int, int, str]:
    """Return the column of a record: its stage, world size and dtype."""
    return record.cell.stage, record.cell.world_size, record.cell.dtype
