"""The matrix of checks x stages, one block for each engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tabulate import tabulate

from zharness.run.record import Record, Verdict

# The gravest first: a square of the matrix that sums up several cells shows its gravest outcomes.
OUTCOME_ORDER = (
    "stale",
    "error",
    "fail",
    "crash",
    "hang",
    "undetermined",
    "excused",
    "contract",
    "unsupported",
    "pass",
)


def outcome_name(record: Record) -> str:
    """The word that stands for a record: its verdict, unless an excuse covers it or has gone stale."""
    if record.stale_reason:
        return "stale"
    if record.expected_failure and record.verdict.is_broken:
        return "excused"
    return record.verdict.value


def render_square(records: Sequence[Record]) -> str:
    """Several cells in one square: ``pass 5``, or how many of each outcome."""
    if not records:
        return ""
    words = [outcome_name(record) for record in records]
    counts = [(word, words.count(word)) for word in OUTCOME_ORDER if word in words]
    return ", ".join(f"{word} {count}" for word, count in counts)


def render_matrix(records: Iterable[Record], tablefmt: str = "simple") -> str:
    """One table for each engine and release: a row for each check, a column for each stage and world size."""
    blocks: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        blocks.setdefault((record.cell.engine_label, record.engine_version), []).append(record)
    return "\n\n".join(
        render_engine_table(engine, version, rows, tablefmt) for (engine, version), rows in blocks.items()
    )


def render_engine_table(engine: str, version: str, records: Sequence[Record], tablefmt: str) -> str:
    """The table of one engine."""
    columns = sorted({(r.cell.stage, r.cell.world_size, r.cell.dtype) for r in records})
    checks = list(dict.fromkeys(record.cell.law for record in records))
    head = [f"stage {stage}, {world_size} ranks, {dtype}" for stage, world_size, dtype in columns]
    body = [
        [
            check,
            *(
                render_square([r for r in records if r.cell.law == check and matrix_column(r) == column])
                for column in columns
            ),
        ]
        for check in checks
    ]
    gap = "\n" if tablefmt == "simple" else "\n\n"  # in Markdown a line right above a table is a part of it
    return f"{engine} {version}{gap}" + tabulate(body, ["check", *head], tablefmt=tablefmt)


def matrix_column(record: Record) -> tuple[int, int, str]:
    """The column of a record."""
    return record.cell.stage, record.cell.world_size, record.cell.dtype


def count_outcomes(records: Iterable[Record]) -> dict[str, int]:
    """How many cells had each outcome, the gravest first."""
    words = [outcome_name(record) for record in records]
    return {word: words.count(word) for word in OUTCOME_ORDER if word in words}


def records_exit_code(records: Sequence[Record]) -> int:
    """0 everything as expected, 1 a law is broken or an excuse is stale, 3 the harness itself failed."""
    if any(record.verdict is Verdict.ERROR for record in records):
        return 3
    return 0 if all(record.is_expected for record in records) else 1
