"""Render the verdicts of cells on several releases as a table, and describe the changes between releases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tabulate import tabulate

from zharness.cell import Cell
from zharness.releases.history import Flip, ReleaseRecords, find_flips, list_cells
from zharness.run.changes import Change, ChangeKind, LawStatus, failure_signature, law_status
from zharness.run.record import Verdict

MAX_CAUSE_LENGTH = 300  # characters of a cause that are printed; the JSON line contains the whole cause


def render_overview(columns: Sequence[ReleaseRecords]) -> str:
    """Return the table of verdicts (cells x releases), the releases on which no cell was run, and each flip.

    A flip is a change of a cell between two consecutive releases: its law holds on one and is broken on the other.
    """
    judged = [column for column in columns if not column.failure_reason]
    flips = list(find_flips(judged))
    parts = [
        render_cell_table(judged),
        *map(describe_unrun, columns),
        *map(describe_unsupported, judged),
        *map(describe_flips, group_flips(flips)),
        render_flip_count(judged, flips),
    ]
    return "\n\n".join(part for part in parts if part)


def render_cell_table(columns: Sequence[ReleaseRecords]) -> str:
    """Return the table of verdicts; cells of a law that have the same verdicts on all releases share a row."""
    rows: dict[tuple[str, tuple[str, ...]], list[Cell]] = {}
    for cell in list_cells(columns):
        verdicts = tuple(column.records[cell].verdict.value if cell in column.records else "" for column in columns)
        rows.setdefault((cell.law, verdicts), []).append(cell)
    body = [[law, describe_cells(same_cells), *verdicts] for (law, verdicts), same_cells in rows.items()]
    return tabulate(body, ["law", "cell", *(column.release for column in columns)], disable_numparse=True)


def describe_cells(same_cells: Sequence[Cell]) -> str:
    """Describe a group of cells: a single cell by the rest of its id, several cells by their number and stages."""
    if len(same_cells) == 1:
        (cell,) = same_cells
        return cell.id.removeprefix(f"{cell.law}[{cell.engine_label}-").removesuffix("]")
    stages = ",".join(str(stage) for stage in sorted({cell.stage for cell in same_cells}))
    return f"{len(same_cells)} cells, stages {stages}"


def describe_unrun(column: ReleaseRecords) -> str:
    """Return the reason why a release was not run, or the empty string if it was run."""
    return f"NOT RUN {column.engine}: {column.failure_reason}" if column.failure_reason else ""


def describe_unsupported(column: ReleaseRecords) -> str:
    """Return the most frequent reason if a release supports none of the cells, else the empty string."""
    if any(record.verdict is not Verdict.UNSUPPORTED for record in column.records.values()):
        return ""
    reasons = Counter(record.cause for record in column.records.values()).most_common(1)
    return "\n".join(f"ALL UNSUPPORTED on {column.release}: {reason}" for reason, _ in reasons)


def group_flips(flips: Iterable[Flip]) -> list[list[Flip]]:
    """Group the flips that have the same two releases, the same direction and the same failure."""
    groups: dict[tuple[str, str, str], list[Flip]] = {}
    for flip in flips:
        failed = flip.after if law_status(flip.after) is LawStatus.BROKEN else flip.before
        key = (flip.before.engine_version, flip.after.engine_version, failure_signature(failed))
        groups.setdefault(key, []).append(flip)
    return list(groups.values())


def describe_flips(flips: Sequence[Flip]) -> str:
    """Describe one group of flips: the cells, the two releases, the failure, and the command that reproduces it."""
    first = flips[0]
    broken = law_status(first.after) is LawStatus.BROKEN
    failed = first.after if broken else first.before
    word = "BROKEN" if broken else "MENDED"
    lines = [
        f"{word} between {first.before.engine_version} and {first.after.engine_version}: {flip.cell.id}"
        for flip in flips
    ]
    return "\n".join([*lines, f"  {shorten_cause(failed.cause)}", f"  again: {failed.command}"])


def shorten_cause(cause: str) -> str:
    """Return ``cause`` on one line, cut to ``MAX_CAUSE_LENGTH`` characters."""
    flat = " ".join(cause.split())
    return flat if len(flat) <= MAX_CAUSE_LENGTH else flat[:MAX_CAUSE_LENGTH] + " ..."


def render_flip_count(columns: Sequence[ReleaseRecords], flips: Sequence[Flip]) -> str:
    """Return the last line of the overview: the number of cells, of releases, and of cells with a flip."""
    cells, flipped = list_cells(columns), {flip.cell for flip in flips}
    return f"{len(cells)} cells on {len(columns)} releases: {len(flipped)} flip, {len(cells) - len(flipped)} do not"


def render_changes(changes: Sequence[Change]) -> str:
    """Describe every change, the worst first, with the command that reproduces it."""
    if not changes:
        return "no cell changed"
    kinds = [(kind, [change for change in changes if change.kind is kind]) for kind in ChangeKind]
    lines = [describe_change(kind, change) for kind, changed in kinds for change in changed]
    total = ", ".join(f"{len(changed)} {kind.value}" for kind, changed in kinds if changed)
    return "\n\n".join([*lines, f"{len(changes)} cells changed: {total}"])


def describe_change(kind: ChangeKind, change: Change) -> str:
    """Describe one change: the cell, both verdicts with their causes, and the command that runs the cell again."""
    before, after = change.before, change.after
    lines = [
        f"{kind.value.upper()} {after.cell.id}",
        f"  {before.engine_version}: {before.verdict.value}{before.cause and f': {shorten_cause(before.cause)}'}",
        f"  {after.engine_version}: {after.verdict.value}{after.cause and f': {shorten_cause(after.cause)}'}",
        f"  again: {after.command}",
    ]
    return "\n".join(lines)
