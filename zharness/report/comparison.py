"""Compare two runs: find the cells that broke, the cells that now hold, and the cells that only one run has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from zharness.cell import Cell
from zharness.errors import UsageError
from zharness.report.failures import shorten_cause
from zharness.run import Record
from zharness.run.changes import ChangeKind, LawStatus, classify_change, law_status, strip_release
from zharness.run.outcomes import outcome_name

MAX_LISTED_CELLS = 8  # differences of one kind that are listed one by one in a terminal


class DifferenceKind(Enum):
    """The kinds of differences of a cell between two runs, in the order in which the report lists them."""

    NEWLY_BROKEN = "newly broken"
    NEW_FAILURE = "new failure"  # broken now, unknown before
    FAILS_DIFFERENTLY = "fails differently"
    NEWLY_HOLDING = "newly holding"
    INCONCLUSIVE = "no longer decided"
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
    """A cell that differs between two runs: ``before`` is None for a new cell, and ``after`` for a removed cell."""

    kind: DifferenceKind
    before: Record | None
    after: Record | None

    @property
    def latest_record(self) -> Record:
        """Return the later record, or the earlier record of a removed cell."""
        latest = self.after or self.before
        assert latest is not None
        return latest


@dataclass(frozen=True)
class RunComparison:
    """The differences between two runs, the worst kind first, and the number of cells that both runs have."""

    differences: tuple[Difference, ...]
    shared_count: int

    def differences_of_kind(self, kind: DifferenceKind) -> list[Difference]:
        """Return the differences of one kind."""
        return [difference for difference in self.differences if difference.kind is kind]

    def count_by_kind(self) -> dict[DifferenceKind, int]:
        """Count the differences of each kind that occurs."""
        return {kind: len(self.differences_of_kind(kind)) for kind in DifferenceKind if self.differences_of_kind(kind)}

    def describe(self) -> str:
        """Summarize the comparison in one line."""
        parts = ", ".join(f"{count} {kind.value}" for kind, count in self.count_by_kind().items())
        return f"{self.shared_count} cells compared: {parts or 'nothing differs'}"


def compare_runs(before: Sequence[Record], after: Sequence[Record]) -> RunComparison:
    """Compare two runs by the last record of each cell in each run.

    If each run has a single release of an engine, the two releases are compared with each other. Raises UsageError if
    the runs share no cell.
    """
    ambiguous = engines_with_several_releases(before, after)
    earlier, later = ({comparison_key(record.cell, ambiguous): record for record in run} for run in (before, after))
    shared = earlier.keys() & later.keys()
    if not shared:
        raise UsageError(
            f"nothing to compare: the earlier run has {len(earlier)} cells, the later {len(later)}, and they share "
            "none; name two runs of the same laws, stages, world sizes, dtypes and models"
        )
    classified = [classify_difference(earlier.get(cell), later.get(cell)) for cell in dict.fromkeys([*later, *earlier])]
    order = list(DifferenceKind)
    differences = sorted(filter(None, classified), key=lambda difference: order.index(difference.kind))
    return RunComparison(tuple(differences), len(shared))


def engines_with_several_releases(*runs: Iterable[Record]) -> set[str]:
    """Return the names (without the release) of the engines that have several releases in one of the runs."""
    engines = set()
    for run in runs:
        releases: dict[str, set[str]] = {}
        for record in run:
            releases.setdefault(strip_release(record.cell).engine, set()).add(record.cell.engine)
        engines |= {name for name, names in releases.items() if len(names) > 1}
    return engines


def comparison_key(cell: Cell, ambiguous_engines: set[str]) -> Cell:
    """Return the cell that identifies a record in both runs.

    Its engine's release is left out unless a run has several releases of the engine.
    """
    return cell if strip_release(cell).engine in ambiguous_engines else strip_release(cell)


def classify_difference(before: Record | None, after: Record | None) -> Difference | None:
    """Return the difference between two records of a cell, or None if the outcome did not change."""
    if after is None:
        return Difference(DifferenceKind.REMOVED, before, None)
    if before is None:
        return Difference(
            DifferenceKind.NEW_FAILURE if law_status(after) is LawStatus.BROKEN else DifferenceKind.ADDED, None, after
        )
    kind = classify_change(before, after)
    if kind is not None:
        return Difference(_DIFFERENCE_KINDS[kind], before, after)
    holds_newly = law_status(after) is LawStatus.HOLDS and law_status(before) is LawStatus.UNKNOWN
    return Difference(DifferenceKind.NEWLY_HOLDING, before, after) if holds_newly else None


def render_comparison(comparison: RunComparison) -> str:
    """Render the differences for a terminal, the worst first, each with both outcomes."""
    parts = [render_difference_group(kind, comparison.differences_of_kind(kind)) for kind in comparison.count_by_kind()]
    return "\n\n".join([*parts, comparison.describe()])


def render_difference_group(kind: DifferenceKind, differences: Sequence[Difference]) -> str:
    """Render the differences of one kind: list them, or only count them by law if they exceed MAX_LISTED_CELLS."""
    lines = [line for difference in differences[:MAX_LISTED_CELLS] for line in render_difference(difference)]
    if len(differences) > MAX_LISTED_CELLS:
        unlisted = differences[MAX_LISTED_CELLS:]
        lines.append(f"  ... and {len(unlisted)} more, by law: {count_by_law(unlisted)}")
    return "\n".join([f"{kind.value.upper()} {len(differences)}", *lines])


def render_difference(difference: Difference) -> list[str]:
    """Render one cell: its id, both outcomes, and the command to run it again."""
    lines = [
        f"  {difference.latest_record.cell.id}",
        *(f"    {render_record_outcome(record)}" for record in (difference.before, difference.after) if record),
    ]
    return lines if difference.after is None else [*lines, f"    again: {difference.after.command}"]


def render_record_outcome(record: Record) -> str:
    """Render one run's outcome of a cell."""
    cause = record.stale_reason or record.cause
    return f"{record.engine_version}: {outcome_name(record)}{cause and f': {shorten_cause(cause)}'}"


def count_by_law(differences: Iterable[Difference]) -> str:
    """Count differences by law, as in ``training.grads 3, state.save 1``."""
    counts = Counter(difference.latest_record.cell.law for difference in differences)
    return ", ".join(f"{name} {count}" for name, count in counts.items())
