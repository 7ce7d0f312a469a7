"""All engines in one table: a row for each law, a column for each engine, a letter for each of its stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tabulate import tabulate

from zharness.report.matrix import OUTCOME_ORDER, outcome_name
from zharness.run.record import Record

# A letter stands for all cells of one law on one engine and stage: the gravest of those that were run, "-" where none
# was, and PARTLY where those that were run pass.
PARTIAL_PASS = ":"
OUTCOME_LETTERS = {
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


def render_overview(records: Sequence[Record]) -> str:
    """Laws x engines; several dtypes are several columns."""
    columns = {column: column_stages(records, column) for column in dict.fromkeys(map(engine_column, records))}
    squares: dict[tuple[str, Column, int], list[str]] = {}
    for record in records:
        squares.setdefault((record.cell.law, engine_column(record), record.cell.stage), []).append(outcome_name(record))
    rows = [
        [
            check,
            *(
                "".join(outcome_letter(squares.get((check, col, s), [])) for s in stages)
                for col, stages in columns.items()
            ),
        ]
        for check in dict.fromkeys(record.cell.law for record in records)
    ]
    head = ["\n".join((*column, "".join(map(str, stages)))) for column, stages in columns.items()]
    table = tabulate(rows, ["engine\nrelease\ndtype\nstage", *head], disable_numparse=True)
    return f"{table}\n\n{LEGEND}"


def engine_column(record: Record) -> Column:
    """Engine, release and dtype."""
    return record.cell.engine_label, record.engine_version, record.cell.dtype


def column_stages(records: Sequence[Record], column: Column) -> list[int]:
    """The stages that one column has."""
    return sorted({record.cell.stage for record in records if engine_column(record) == column})


def outcome_letter(outcomes: Sequence[str]) -> str:
    """The letter of several cells; a blank where there is none."""
    if set(outcomes) == {"pass", "unsupported"}:
        return PARTIAL_PASS
    ranked = [*(word for word in OUTCOME_ORDER if word != "unsupported"), "unsupported"]
    return next((OUTCOME_LETTERS[word] for word in ranked if word in outcomes), " ")


def render_contracts(records: Sequence[Record]) -> str:
    """Where engines document that they differ: how many laws of each group, stages, reason and address."""
    found: dict[tuple[str, str, str], dict[str, set[int]]] = {}
    for record in records:
        if outcome_name(record) == "contract":
            laws = found.setdefault((record.cell.engine_label, record.cause, record.documentation_url), {})
            laws.setdefault(record.cell.law, set()).add(record.cell.stage)
    rows = [
        [engine, count_by_group(laws), "".join(map(str, sorted(set().union(*laws.values())))), cause, documented]
        for (engine, cause, documented), laws in found.items()
    ]
    return tabulate(
        rows, ["engine", "laws", "stages", "how it differs", "documented at"], "github", disable_numparse=True
    )


def count_by_group(laws: Iterable[str]) -> str:
    """``backward 7, checkpointing 8``; a law that is its group's only one by its name."""
    groups: dict[str, list[str]] = {}
    for law in laws:
        groups.setdefault(law.partition(".")[0], []).append(law)
    return ", ".join(members[0] if len(members) == 1 else f"{name} {len(members)}" for name, members in groups.items())
