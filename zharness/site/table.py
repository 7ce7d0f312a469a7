"""Build the table of the index: a row for each group and law, a column for each engine release."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zharness.run.changes import LawStatus, law_status
from zharness.run.outcomes import count_outcomes, group_records
from zharness.run.record import Record
from zharness.site.columns import Column, find_column, worst_outcome


@dataclass(frozen=True)
class Square:
    """The outcomes of one law, or of one group of laws, on one engine release.

    ``outcome`` is the most serious outcome, or empty if no cell was run. ``counts`` has the number of cells of each
    outcome. ``status`` says whether the law is broken in any cell; an expected failure also counts as broken.
    ``fails_here_only`` says that the law is broken on this engine, holds on another engine, and is broken in no release
    of another engine.
    """

    outcome: str
    counts: str
    status: LawStatus
    fails_here_only: bool = False


@dataclass(frozen=True)
class Row:
    """A row of the table: a group of laws, or one law, with a square for each column."""

    name: str
    squares: tuple[Square, ...]

    @property
    def group(self) -> str:
        """The group of the law."""
        return self.name.partition(".")[0]

    @property
    def is_group(self) -> bool:
        """Whether the row sums up a group of laws."""
        return "." not in self.name


@dataclass(frozen=True)
class Tally:
    """The number of laws that hold on one engine release, and of laws that are broken in at least one cell."""

    column: Column
    holding: int
    broken: int

    @property
    def counts(self) -> str:
        """The counts, as the badge shows them."""
        return f"{self.holding} hold, {self.broken} broken"


def build_rows(records: Sequence[Record], columns: Sequence[Column]) -> tuple[Row, ...]:
    """Build the rows, the laws of each group below the group's row."""
    by_law = group_records(records, lambda record: record.cell.law)
    laws = {law: build_law_row(law, found, columns) for law, found in by_law.items()}
    rows: list[Row] = []
    for group in dict.fromkeys(row.group for row in laws.values()):
        members = [row for row in laws.values() if row.group == group]
        found = [record for row in members for record in by_law[row.name]]
        by_column = group_records(found, find_column)
        only = [any(row.squares[i].fails_here_only for row in members) for i in range(len(columns))]
        rows.append(
            Row(
                group,
                tuple(
                    summarize(by_column.get(column, ()), here_only)
                    for column, here_only in zip(columns, only, strict=True)
                ),
            )
        )
        rows.extend(members)
    return tuple(rows)


def build_law_row(law: str, records: Sequence[Record], columns: Sequence[Column]) -> Row:
    """Build the row of one law."""
    by_column = group_records(records, find_column)
    statuses = {column: conclude_status(found) for column, found in by_column.items()}
    return Row(
        law,
        tuple(summarize(by_column.get(column, ()), fails_here_only(column, statuses)) for column in columns),
    )


def summarize(records: Sequence[Record], here_only: bool) -> Square:
    """Sum up the records of one square."""
    counts = ", ".join(f"{count} {outcome}" for outcome, count in count_outcomes(records).items())
    return Square(worst_outcome(records), counts, conclude_status(records), here_only)


def conclude_status(records: Iterable[Record]) -> LawStatus:
    """Return BROKEN if the law is broken in any record, else HOLDS if it holds in any record, else UNKNOWN."""
    statuses = set(map(law_status, records))
    return next(
        (status for status in (LawStatus.BROKEN, LawStatus.HOLDS) if status in statuses),
        LawStatus.UNKNOWN,
    )


def fails_here_only(column: Column, statuses: Mapping[Column, LawStatus]) -> bool:
    """Return whether a law is broken in ``column``, holds on another engine, and is broken on no other engine."""
    others = {status for other, status in statuses.items() if other.engine != column.engine}
    return statuses.get(column) is LawStatus.BROKEN and LawStatus.HOLDS in others and LawStatus.BROKEN not in others


def count_laws(rows: Sequence[Row], columns: Sequence[Column]) -> tuple[Tally, ...]:
    """Count the laws that hold and those that are broken on each engine release."""
    laws = [row for row in rows if not row.is_group]
    return tuple(
        Tally(
            column,
            sum(row.squares[i].status is LawStatus.HOLDS for row in laws),
            sum(row.squares[i].status is LawStatus.BROKEN for row in laws),
        )
        for i, column in enumerate(columns)
    )
