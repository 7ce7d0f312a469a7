"""Two runs side by side: what is newly broken, what newly holds, what one of them has alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from zharness.cell import Cell
from zharness.errors import UsageError
from zharness.report.failures import shorten_cause
from zharness.report.matrix import outcome_name
from zharness.run import Record
from zharness.run.changes import ChangeKind, LawStatus, classify_change, law_status, strip_release

MAX_LISTED_CELLS = 8  # cells that went the same way are told one by one up to this number in a terminal


class DifferenceKind(Enum):
    """How a cell of one run differs from the other's, in the order in which a reader wants to know."""

    NEWLY_BROKEN = "newly broken"
    NEW_FAILURE = "new failure"  # broken where nothing was shown before
    FAILS_DIFFERENTLY = "fails otherwise"
    NEWLY_HOLDING = "newly holding"
    INCONCLUSIVE = "shows nothing any more"
    REMOVED = "gone"
    ADDED = "new"


_DIFFERENCE_KINDS = {
    ChangeKind.NEWLY_BROKEN: DifferenceKind.NEWLY_BROKEN,
    ChangeKind.NEW_FAILURE: DifferenceKind.NEW_FAILURE,
    ChangeKind.FAILS_DIFFERENTLY: DifferenceKind.FAILS_DIFFERENTLY,
    ChangeKind.HOLDS_AGAIN: DifferenceKind.NEWLY_HOLDING,
    ChangeKind.INCONCLUSIVE: DifferenceKind.INCONCLUSIVE,
}


@dataclass(frozen=True)
class Difference:
    """A cell that differs; ``before`` is None where it is new, ``after`` where it is gone."""

    kind: DifferenceKind
    before: Record | None
    after: Record | None

    @property
    def latest_record(self) -> Record:
        """The record that stands for the cell: the later one where there is one."""
        found = self.after or self.before
        assert found is not None
        return found


@dataclass(frozen=True)
class RunComparison:
    """What differs, the worst first, and how many cells both runs have."""

    differences: tuple[Difference, ...]
    shared_count: int

    def differences_of_kind(self, kind: DifferenceKind) -> list[Difference]:
        """The differences of one kind."""
        return [each for each in self.differences if each.kind is kind]

    def count_by_kind(self) -> dict[DifferenceKind, int]:
        """How many of each kind that there is."""
        return {turn: len(self.differences_of_kind(turn)) for turn in DifferenceKind if self.differences_of_kind(turn)}

    def describe(self) -> str:
        """One line."""
        parts = ", ".join(f"{count} {turn.value}" for turn, count in self.count_by_kind().items())
        return f"{self.shared_count} cells compared: {parts or 'nothing differs'}"


def compare_runs(before: Sequence[Record], after: Sequence[Record]) -> RunComparison:
    """What differs between two runs; a cell's last line in each is in force.

    An engine that each run has on one release is the same engine in both, whatever the releases are. Raises UsageError
    where the runs share no cell.
    """
    same = engines_with_several_releases(before, after)
    earlier, later = ({comparison_key(record.cell, same): record for record in run} for run in (before, after))
    shared = earlier.keys() & later.keys()
    if not shared:
        raise UsageError(
            f"nothing to compare: of {len(earlier)} cells before and {len(later)} now none is the same; "
            "name two runs of the same checks, stages, world sizes, dtypes and models"
        )
    found = [classify_difference(earlier.get(case), later.get(case)) for case in dict.fromkeys([*later, *earlier])]
    order = list(DifferenceKind)
    told = sorted(filter(None, found), key=lambda each: order.index(each.kind))
    return RunComparison(tuple(told), len(shared))


def engines_with_several_releases(*runs: Iterable[Record]) -> set[str]:
    """The engines, by their bare names, that some run has on several releases: there, the release tells cells apart."""
    found = set()
    for run in runs:
        spellings: dict[str, set[str]] = {}
        for record in run:
            spellings.setdefault(strip_release(record.cell).engine, set()).add(record.cell.engine)
        found |= {name for name, spelled in spellings.items() if len(spelled) > 1}
    return found


def comparison_key(cell: Cell, ambiguous_engines: set[str]) -> Cell:
    """What a cell is called in both runs."""
    return cell if strip_release(cell).engine in ambiguous_engines else strip_release(cell)


def classify_difference(before: Record | None, after: Record | None) -> Difference | None:
    """How one cell differs; None where it does not."""
    if after is None:
        return Difference(DifferenceKind.REMOVED, before, None)
    if before is None:
        return Difference(
            DifferenceKind.NEW_FAILURE if law_status(after) is LawStatus.BROKEN else DifferenceKind.ADDED, None, after
        )
    kind = classify_change(before, after)
    if kind is not None:
        return Difference(_DIFFERENCE_KINDS[kind], before, after)
    newly = law_status(after) is LawStatus.HOLDS and law_status(before) is LawStatus.UNKNOWN
    return Difference(DifferenceKind.NEWLY_HOLDING, before, after) if newly else None


def render_comparison(comparison: RunComparison) -> str:
    """For a terminal: each difference with both outcomes, the worst first; many alike are counted."""
    parts = [render_difference_group(turn, comparison.differences_of_kind(turn)) for turn in comparison.count_by_kind()]
    return "\n\n".join([*parts, comparison.describe()])


def render_difference_group(kind: DifferenceKind, differences: Sequence[Difference]) -> str:
    """The cells that went the same way."""
    lines = [line for each in differences[:MAX_LISTED_CELLS] for line in render_difference(each)]
    if len(differences) > MAX_LISTED_CELLS:
        lines.append(
            f"  ... and {len(differences) - MAX_LISTED_CELLS} more, by check: {count_by_law(differences[MAX_LISTED_CELLS:])}"
        )
    return "\n".join([f"{kind.value.upper()} {len(differences)}", *lines])


def render_difference(difference: Difference) -> list[str]:
    """One cell: its id, what it was and what it is, and the command for what still runs."""
    lines = [
        f"  {difference.latest_record.cell.id}",
        *(f"    {render_record_outcome(record)}" for record in (difference.before, difference.after) if record),
    ]
    return lines if difference.after is None else [*lines, f"    again: {difference.after.command}"]


def render_record_outcome(record: Record) -> str:
    """One run's outcome."""
    cause = record.stale_reason or record.cause
    return f"{record.engine_version}: {outcome_name(record)}{cause and f': {shorten_cause(cause)}'}"


def count_by_law(differences: Iterable[Difference]) -> str:
    """``training.grads 3, state.save 1``."""
    counts: dict[str, int] = {}
    for each in differences:
        counts[each.latest_record.cell.law] = counts.get(each.latest_record.cell.law, 0) + 1
    return ", ".join(f"{name} {count}" for name, count in counts.items())
