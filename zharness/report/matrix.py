"""The matrix of checks x stages, one block for each engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tabulate import tabulate

from zharness.run.record import Record, Verdict

# The gravest first: a square of the matrix that sums up several cells shows its gravest outcomes.
ORDER = ("stale", "error", "fail", "crash", "hang", "undetermined", "excused", "contract", "unsupported", "pass")


def outcome(record: Record) -> str:
    """The word that stands for a record: its verdict, unless an excuse covers it or has gone stale."""
    if record.stale:
        return "stale"
    if record.excuse and record.verdict.broken:
        return "excused"
    return record.verdict.value


def square(records: Sequence[Record]) -> str:
    """Several cells in one square: ``pass 5``, or how many of each outcome."""
    if not records:
        return ""
    words = [outcome(record) for record in records]
    counts = [(word, words.count(word)) for word in ORDER if word in words]
    return ", ".join(f"{word} {count}" for word, count in counts)


def matrix(records: Iterable[Record], tablefmt: str = "simple") -> str:
    """One table for each engine and release: a row for each check, a column for each stage and world size."""
    blocks: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        blocks.setdefault((record.case.subject, record.engine_version), []).append(record)
    return "\n\n".join(block(engine, version, rows, tablefmt) for (engine, version), rows in blocks.items())


def block(engine: str, version: str, records: Sequence[Record], tablefmt: str) -> str:
    """The table of one engine."""
    columns = sorted({(r.case.stage, r.case.world_size, r.case.dtype) for r in records})
    checks = list(dict.fromkeys(record.case.check for record in records))
    head = [f"stage {stage}, {world_size} ranks, {dtype}" for stage, world_size, dtype in columns]
    body = [
        [check, *(square([r for r in records if r.case.check == check and at(r) == column]) for column in columns)]
        for check in checks
    ]
    gap = "\n" if tablefmt == "simple" else "\n\n"  # in Markdown a line right above a table is a part of it
    return f"{engine} {version}{gap}" + tabulate(body, ["check", *head], tablefmt=tablefmt)


def at(record: Record) -> tuple[int, int, str]:
    """The column of a record."""
    return record.case.stage, record.case.world_size, record.case.dtype


def counts(records: Iterable[Record]) -> dict[str, int]:
    """How many cells had each outcome, the gravest first."""
    words = [outcome(record) for record in records]
    return {word: words.count(word) for word in ORDER if word in words}


def exit_code(records: Sequence[Record]) -> int:
    """0 everything as expected, 1 a law is broken or an excuse is stale, 3 the harness itself failed."""
    if any(record.verdict is Verdict.ERROR for record in records):
        return 3
    return 0 if all(record.expected for record in records) else 1
