"""The first release on which a law is broken, or holds, in as many runs as halving takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from zharness.errors import UsageError

LONGEST = 120  # characters of a reason


class Outcome(Enum):
    """What one release shows."""

    GOOD = "good"
    BAD = "bad"
    SKIPPED = "skipped"  # it cannot be had, or shows neither


@dataclass(frozen=True)
class Step:
    """One run: the release, what it showed, why, and how many releases are left between the two sides."""

    release: str
    outcome: Outcome
    why: str
    left: int


@dataclass(frozen=True)
class Found:
    """Where it turned: ``last`` is the last release before, ``first`` the first release after.

    ``skipped`` are those between them that show neither; any of them may be the one where it turned.
    """

    last: str
    first: str
    turns: Outcome
    skipped: tuple[str, ...]
    runs: int


Trial = Callable[[str], tuple[Outcome, str]]


def bisect(releases: Sequence[str], oldest: Outcome, trial: Trial, told: Callable[[Step], None]) -> Found:
    """Where ``releases``, the oldest first, turn from ``oldest`` to the other outcome.

    ``trial(release)`` runs one, ``told`` hears every step. The two ends are run first. Raises UsageError when they do
    not show what they should. A release that shows neither is stepped over, as git bisect does: its nearest neighbour
    is run instead.
    """
    newest = Outcome.BAD if oldest is Outcome.GOOD else Outcome.GOOD
    for release, expected in ((releases[0], oldest), (releases[-1], newest)):
        outcome, why = trial(release)
        told(Step(release, outcome, why, max(0, len(releases) - 2)))
        if outcome is not expected:
            raise UsageError(
                f"{release} was named as {expected.value} and is {outcome.value}: {why}; "
                "name two releases between which it turns"
            )
    low, high, runs, skipped = 0, len(releases) - 1, 2, set[int]()
    while (middle := nearest(low, high, skipped)) is not None:
        outcome, why = trial(releases[middle])
        runs += 1
        if outcome is Outcome.SKIPPED:
            skipped.add(middle)
        elif outcome is oldest:
            low = middle
        else:
            high = middle
        told(Step(releases[middle], outcome, why, sum(index not in skipped for index in range(low + 1, high))))
    between = tuple(releases[index] for index in range(low + 1, high))
    return Found(releases[low], releases[high], newest, between, runs)


def nearest(low: int, high: int, skipped: set[int]) -> int | None:
    """The index between ``low`` and ``high`` that is nearest to their middle and not skipped, if any is left."""
    left = [index for index in range(low + 1, high) if index not in skipped]
    return min(left, key=lambda index: abs(2 * index - low - high), default=None)


def words(step: Step) -> str:
    """One line for a run."""
    left = f"{step.left} left between" if step.left else "none left between"
    why = step.why if len(step.why) <= LONGEST else f"{step.why[:LONGEST]} ..."
    return f"{step.release}: {step.outcome.value} ({left}){why and f': {why}'}"


def verdict(found: Found) -> str:
    """The last line: where it turned, and after how many runs."""
    kind = "bad" if found.turns is Outcome.BAD else "good"
    if found.skipped:
        several = ", ".join((*found.skipped, found.first))
        return f"the first {kind} release is one of {several} (those before the last show neither); {found.runs} runs"
    return f"the first {kind} release is {found.first}; the one before, {found.last}, is not; {found.runs} runs"
