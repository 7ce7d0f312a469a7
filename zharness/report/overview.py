"""Render all engines in one table: a row for each law, a column for each engine, a letter for each of its stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from tabulate import tabulate

from zharness.report.engine_names import name_engines
from zharness.run.outcomes import OUTCOME_ORDER, group_records, outcome_name
from zharness.run.record import Record

# A letter stands for all cells of one law on one engine and stage: the most serious outcome of the cells that were run,
# "-" if no cell was run, and PARTLY_RUN if some cells were not run and all other cells pass.
PARTLY_RUN = ":"
OUTCOME_LETTERS = {
    "stale": "S",
    "error": "E",
    "fail": "F",
    "crash": "F",
    "hang": "F",
    "undetermined": "U",
    "leak": "L",
    "excused": "x",
    "contract": "c",
    "pass": ".",
    "unsupported": "-",
}
LEGEND = """\
.  the law holds                                       F  it is broken
:  it holds in the cells that the engine supports, which are not all
c  it holds with the remedy that the engine documents  S  it holds, but was expected to fail
x  it is broken, and was expected to be                U  undetermined: nothing was shown
-  not claimed, or not stated for this dtype           E  the harness failed
L  it is broken only on ranks that earlier cells had used"""
Column = tuple[str, str, str]


def render_overview(records: Sequence[Record]) -> str:
    """Render a table of laws x engines for each mesh, with a column for each release and dtype of an engine."""
    names = name_engines(records)
    tables = [render_table_of_mesh(mesh, rows, names) for mesh, rows in group_records(records, name_mesh).items()]
    return "\n\n".join((*tables, LEGEND))


def name_mesh(record: Record) -> str:
    """Return the world size and the mesh of a record as in a cell's id, ``w4.tp2``; '' without a mesh."""
    mesh = record.cell.mesh
    return f"w{record.cell.world_size}.{mesh.label}" if mesh.sizes else ""


def render_table_of_mesh(mesh: str, records: Sequence[Record], names: Mapping[str, str]) -> str:
    """Render the table of one mesh below its name. Without a mesh, laws that no engine ran also have rows."""
    engine_column = partial(find_engine_column, names)
    columns = {
        column: sorted({record.cell.stage for record in rows})
        for column, rows in group_records(records, engine_column).items()
    }
    squares: dict[tuple[str, Column, int], list[str]] = {}
    for record in records:
        squares.setdefault((record.cell.law, engine_column(record), record.cell.stage), []).append(outcome_name(record))
    rows = [
        [
            law,
            *(
                "".join(outcome_letter(squares.get((law, col, s), [])) for s in stages)
                for col, stages in columns.items()
            ),
        ]
        for law in dict.fromkeys(record.cell.law for record in records)
    ]
    if mesh:
        rows = [row for row in rows if set("".join(row[1:])) - {OUTCOME_LETTERS["unsupported"], " "}]
    head = ["\n".join((*column, "".join(map(str, stages)))) for column, stages in columns.items()]
    table = tabulate(rows, ["engine\nrelease\ndtype\nstage", *head], disable_numparse=True)
    return f"mesh {mesh}\n\n{table}" if mesh else table


def find_engine_column(names: Mapping[str, str], record: Record) -> Column:
    """Return the column of a record: the engine by its name in ``names``, its release and the dtype."""
    label = record.cell.engine_label
    return names.get(label, label), record.engine_version, record.cell.dtype


def outcome_letter(outcomes: Sequence[str]) -> str:
    """Return the letter for the outcomes of one square, or a blank for a square without outcomes."""
    if set(outcomes) == {"pass", "unsupported"}:
        return PARTLY_RUN
    ranked = [*(outcome for outcome in OUTCOME_ORDER if outcome != "unsupported"), "unsupported"]
    return next((OUTCOME_LETTERS[outcome] for outcome in ranked if outcome in outcomes), " ")


def render_contracts(records: Sequence[Record]) -> str:
    """Render the documented differences as a table: counts of laws by group, stages, reason and address."""
    contracts: dict[tuple[str, str, str], dict[str, set[int]]] = {}
    for record in records:
        if outcome_name(record) == "contract":
            laws = contracts.setdefault((record.cell.engine_label, record.cause, record.documentation_url), {})
            laws.setdefault(record.cell.law, set()).add(record.cell.stage)
    rows = [
        [engine, count_by_group(laws), "".join(map(str, sorted(set().union(*laws.values())))), cause, documented]
        for (engine, cause, documented), laws in contracts.items()
    ]
    return tabulate(
        rows, ["engine", "laws", "stages", "how it differs", "documented at"], "github", disable_numparse=True
    )


def count_by_group(laws: Iterable[str]) -> str:
    """Count laws by group, as in ``backward 7, checkpointing 8``; a group with one law is named by that law."""
    groups: dict[str, list[str]] = {}
    for law in laws:
        groups.setdefault(law.partition(".")[0], []).append(law)
    return ", ".join(members[0] if len(members) == 1 else f"{name} {len(members)}" for name, members in groups.items())
