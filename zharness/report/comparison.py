"""Two runs side by side: what is newly broken, what newly holds, what one of them has alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from zharness.case import Case
from zharness.errors import UsageError
from zharness.report.matrix import outcome
from zharness.report.words import shortened
from zharness.run import Record
from zharness.run.changes import Kind, Standing, bare, changed, standing

MANY = 8  # cells that went the same way are told one by one up to this number in a terminal


class Turn(Enum):
    """How a cell of one run differs from the other's, in the order in which a reader wants to know."""

    BROKEN = "newly broken"
    FAILURE = "new failure"  # broken where nothing was shown before
    OTHERWISE = "fails otherwise"
    HOLDS = "newly holding"
    LOST = "shows nothing any more"
    GONE = "gone"
    NEW = "new"


_TURNS = {
    Kind.BROKEN: Turn.BROKEN,
    Kind.NEW: Turn.FAILURE,
    Kind.OTHERWISE: Turn.OTHERWISE,
    Kind.HOLDS: Turn.HOLDS,
    Kind.LOST: Turn.LOST,
}


@dataclass(frozen=True)
class Difference:
    """A cell that differs; ``before`` is None where it is new, ``after`` where it is gone."""

    turn: Turn
    before: Record | None
    after: Record | None

    @property
    def told(self) -> Record:
        """The record that stands for the cell: the later one where there is one."""
        found = self.after or self.before
        assert found is not None
        return found


@dataclass(frozen=True)
class Comparison:
    """What differs, the worst first, and how many cells both runs have."""

    differences: tuple[Difference, ...]
    shared: int

    def of(self, turn: Turn) -> list[Difference]:
        """The differences of one kind."""
        return [each for each in self.differences if each.turn is turn]

    def counts(self) -> dict[Turn, int]:
        """How many of each kind that there is."""
        return {turn: len(self.of(turn)) for turn in Turn if self.of(turn)}

    def words(self) -> str:
        """One line."""
        parts = ", ".join(f"{count} {turn.value}" for turn, count in self.counts().items())
        return f"{self.shared} cells compared: {parts or 'nothing differs'}"


def compare(before: Sequence[Record], after: Sequence[Record]) -> Comparison:
    """What differs between two runs; a cell's last line in each is in force.

    An engine that each run has on one release is the same engine in both, whatever the releases are. Raises UsageError
    where the runs share no cell.
    """
    same = apart(before, after)
    earlier, later = ({key(record.case, same): record for record in run} for run in (before, after))
    shared = earlier.keys() & later.keys()
    if not shared:
        raise UsageError(
            f"nothing to compare: of {len(earlier)} cells before and {len(later)} now none is the same; "
            "name two runs of the same checks, stages, world sizes, dtypes and models"
        )
    found = [difference(earlier.get(case), later.get(case)) for case in dict.fromkeys([*later, *earlier])]
    order = list(Turn)
    told = sorted(filter(None, found), key=lambda each: order.index(each.turn))
    return Comparison(tuple(told), len(shared))


def apart(*runs: Iterable[Record]) -> set[str]:
    """The engines, by their bare names, that some run has on several releases: there, the release tells cells apart."""
    found = set()
    for run in runs:
        spellings: dict[str, set[str]] = {}
        for record in run:
            spellings.setdefault(bare(record.case).engine, set()).add(record.case.engine)
        found |= {name for name, spelled in spellings.items() if len(spelled) > 1}
    return found


def key(case: Case, several: set[str]) -> Case:
    """What a cell is called in both runs."""
    return case if bare(case).engine in several else bare(case)


def difference(before: Record | None, after: Record | None) -> Difference | None:
    """How one cell differs; None where it does not."""
    if after is None:
        return Difference(Turn.GONE, before, None)
    if before is None:
        return Difference(Turn.FAILURE if standing(after) is Standing.BROKEN else Turn.NEW, None, after)
    kind = changed(before, after)
    if kind is not None:
        return Difference(_TURNS[kind], before, after)
    newly = standing(after) is Standing.HOLDS and standing(before) is Standing.UNKNOWN
    return Difference(Turn.HOLDS, before, after) if newly else None


def text(comparison: Comparison) -> str:
    """For a terminal: each difference with both outcomes, the worst first; many alike are counted."""
    parts = [paragraph(turn, comparison.of(turn)) for turn in comparison.counts()]
    return "\n\n".join([*parts, comparison.words()])


def paragraph(turn: Turn, alike: Sequence[Difference]) -> str:
    """The cells that went the same way."""
    lines = [line for each in alike[:MANY] for line in told(each)]
    if len(alike) > MANY:
        lines.append(f"  ... and {len(alike) - MANY} more, by check: {by_check(alike[MANY:])}")
    return "\n".join([f"{turn.value.upper()} {len(alike)}", *lines])


def told(each: Difference) -> list[str]:
    """One cell: its id, what it was and what it is, and the command for what still runs."""
    lines = [f"  {each.told.case.id}", *(f"    {side(record)}" for record in (each.before, each.after) if record)]
    return lines if each.after is None else [*lines, f"    again: {each.after.command}"]


def side(record: Record) -> str:
    """One run's outcome."""
    cause = record.stale or record.cause
    return f"{record.engine_version}: {outcome(record)}{cause and f': {shortened(cause)}'}"


def by_check(alike: Iterable[Difference]) -> str:
    """``training.grads 3, state.save 1``."""
    counts: dict[str, int] = {}
    for each in alike:
        counts[each.told.case.check] = counts.get(each.told.case.check, 0) + 1
    return ", ".join(f"{name} {count}" for name, count in counts.items())
