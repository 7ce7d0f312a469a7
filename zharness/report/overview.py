"""All engines in one table: a row for each law, a column for each engine, a letter for each of its stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tabulate import tabulate

from zharness.report.matrix import ORDER, outcome
from zharness.run.record import Record

# A letter stands for all cells of one law on one engine and stage: the gravest of those that were run, "-" where none
# was, and PARTLY where those that were run pass.
PARTLY = ":"
LETTERS = {
    "stale": "S",
    "error": "E",
    "fail": "F",
    "crash": "F",
    "hang": "F",
    "undetermined": "U",
    "excused": "x",
    "contract": "c",
    "pass": ".",
    "unsupported": "-",
}
LEGEND = """\
.  the law holds                                          F  it does not
:  it holds where the engine claims it, in part of the cells
c  it holds with the remedy that the engine documents     S  an excuse that no longer holds
x  it does not, and an excuse says so                     U  undetermined: nothing was shown
-  not claimed, or not stated for this dtype              E  the harness failed"""
Column = tuple[str, str, str]


def overview(records: Sequence[Record]) -> str:
    """Laws x engines; several dtypes are several columns."""
    columns = {column: stages_of(records, column) for column in dict.fromkeys(map(column_of, records))}
    squares: dict[tuple[str, Column, int], list[str]] = {}
    for record in records:
        squares.setdefault((record.case.check, column_of(record), record.case.stage), []).append(outcome(record))
    rows = [
        [check, *("".join(letter(squares.get((check, col, s), [])) for s in stages) for col, stages in columns.items())]
        for check in dict.fromkeys(record.case.check for record in records)
    ]
    head = ["\n".join((*column, "".join(map(str, stages)))) for column, stages in columns.items()]
    table = tabulate(rows, ["engine\nrelease\ndtype\nstage", *head], disable_numparse=True)
    return f"{table}\n\n{LEGEND}"


def column_of(record: Record) -> Column:
    """Engine, release and dtype."""
    return record.case.subject, record.engine_version, record.case.dtype


def stages_of(records: Sequence[Record], column: Column) -> list[int]:
    """The stages that one column has."""
    return sorted({record.case.stage for record in records if column_of(record) == column})


def letter(outcomes: Sequence[str]) -> str:
    """The letter of several cells; a blank where there is none."""
    if set(outcomes) == {"pass", "unsupported"}:
        return PARTLY
    ranked = [*(word for word in ORDER if word != "unsupported"), "unsupported"]
    return next((LETTERS[word] for word in ranked if word in outcomes), " ")


def contracts(records: Sequence[Record]) -> str:
    """Where engines document that they differ: how many laws of each group, stages, reason and address."""
    found: dict[tuple[str, str, str], dict[str, set[int]]] = {}
    for record in records:
        if outcome(record) == "contract":
            laws = found.setdefault((record.case.subject, record.cause, record.documented), {})
            laws.setdefault(record.case.check, set()).add(record.case.stage)
    rows = [
        [engine, by_group(laws), "".join(map(str, sorted(set().union(*laws.values())))), cause, documented]
        for (engine, cause, documented), laws in found.items()
    ]
    return tabulate(
        rows, ["engine", "laws", "stages", "how it differs", "documented at"], "github", disable_numparse=True
    )


def by_group(laws: Iterable[str]) -> str:
    """``backward 7, checkpointing 8``; a law that is its group's only one by its name."""
    groups: dict[str, list[str]] = {}
    for law in laws:
        groups.setdefault(law.partition(".")[0], []).append(law)
    return ", ".join(members[0] if len(members) == 1 else f"{name} {len(members)}" for name, members in groups.items())
