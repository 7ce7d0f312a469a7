"""Cells over releases as a table, and in words where each flipped and what changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tabulate import tabulate

from zharness.case import Case
from zharness.releases.history import Column, Flip, cells, flips
from zharness.run.changes import Change, Kind, Standing, signature, standing

LONGEST = 300  # characters of a cause; the JSON line has all of it


def overview(found: Sequence[Column]) -> str:
    """The table of cells x releases, the releases that were not run, and each flip."""
    told = [each for each in found if not each.trouble]
    turned = list(flips(told))
    parts = [table(told), *map(trouble, found), *map(paragraph, grouped(turned)), count(told, turned)]
    return "\n\n".join(part for part in parts if part)


def table(found: Sequence[Column]) -> str:
    """A row for each cell; one row for all cells of a check that went the same way everywhere."""
    rows: dict[tuple[str, tuple[str, ...]], list[Case]] = {}
    for case in cells(found):
        way = tuple(each.records[case].verdict.value if case in each.records else "" for each in found)
        rows.setdefault((case.check, way), []).append(case)
    body = [[check, named(alike), *way] for (check, way), alike in rows.items()]
    return tabulate(body, ["check", "cell", *(each.release for each in found)], disable_numparse=True)


def named(alike: Sequence[Case]) -> str:
    """One cell by its axes, several by their number and stages."""
    if len(alike) == 1:
        (case,) = alike
        return case.id.removeprefix(f"{case.check}[{case.subject}-").removesuffix("]")
    stages = ",".join(str(stage) for stage in sorted({case.stage for case in alike}))
    return f"{len(alike)} cells, stages {stages}"


def trouble(each: Column) -> str:
    """Why a release was not run."""
    return f"NOT RUN {each.text}: {each.trouble}" if each.trouble else ""


def grouped(turned: Iterable[Flip]) -> list[list[Flip]]:
    """Flips between the same two releases, in the same direction, with the same failure."""
    groups: dict[tuple[str, str, str], list[Flip]] = {}
    for flip in turned:
        failed = flip.after if standing(flip.after) is Standing.BROKEN else flip.before
        key = (flip.before.engine_version, flip.after.engine_version, signature(failed))
        groups.setdefault(key, []).append(flip)
    return list(groups.values())


def paragraph(alike: Sequence[Flip]) -> str:
    """Cells that flipped alike: which, between which releases, the failure, and the command for both sides."""
    first = alike[0]
    broken = standing(first.after) is Standing.BROKEN
    failed = first.after if broken else first.before
    word = "BROKEN" if broken else "MENDED"
    lines = [
        f"{word} between {first.before.engine_version} and {first.after.engine_version}: {flip.case.id}"
        for flip in alike
    ]
    return "\n".join([*lines, f"  {shortened(failed.cause)}", f"  again: {failed.command}"])


def shortened(cause: str) -> str:
    """The begin of a cause, on one line."""
    flat = " ".join(cause.split())
    return flat if len(flat) <= LONGEST else flat[:LONGEST] + " ..."


def count(found: Sequence[Column], turned: Sequence[Flip]) -> str:
    """The last line of a matrix over releases."""
    every, flipped = cells(found), {flip.case for flip in turned}
    return f"{len(every)} cells on {len(found)} releases: {len(flipped)} flip, {len(every) - len(flipped)} do not"


def differences(found: Sequence[Change]) -> str:
    """Every change, the worst first, with the command that shows it; one line where there is none."""
    if not found:
        return "no cell changed"
    kinds = [(kind, [change for change in found if change.kind is kind]) for kind in Kind]
    lines = [told(kind, change) for kind, changed in kinds for change in changed]
    total = ", ".join(f"{len(changed)} {kind.value}" for kind, changed in kinds if changed)
    return "\n\n".join([*lines, f"{len(found)} cells changed: {total}"])


def told(kind: Kind, change: Change) -> str:
    """One change."""
    before, after = change.before, change.after
    lines = [
        f"{kind.value.upper()} {after.case.id}",
        f"  {before.engine_version}: {before.verdict.value}{before.cause and f': {shortened(before.cause)}'}",
        f"  {after.engine_version}: {after.verdict.value}{after.cause and f': {shortened(after.cause)}'}",
        f"  again: {after.command}",
    ]
    return "\n".join(lines)
