"""The first release on which a law is broken, or holds, in as many runs as halving takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from zharness.errors import UsageError

MAX_REASON_LENGTH = 120  # characters of a reason


class Outcome(Enum):
    """What one release shows."""

    GOOD = "good"
    BAD = "bad"
    SKIPPED = "skipped"  # it cannot be had, or shows neither


@dataclass(frozen=True)
class BisectStep:
    """One run: the release, what it showed, why, and how many releases are left between the two sides."""

    release: str
    outcome: Outcome
    reason: str
    remaining: int


@dataclass(frozen=True)
class BisectResult:
    """Where it turned: ``last`` is the last release before, ``first`` the first release after.

    ``skipped`` are those between them that show neither; any of them may be the one where it turned.
    """

    last_before: str
    first_after: str
    new_outcome: Outcome
    skipped: tuple[str, ...]
    run_count: int


ReleaseTrial = Callable[[str], tuple[Outcome, str]]


def bisect(
    releases: Sequence[str], oldest: Outcome, run_trial: ReleaseTrial, on_step: Callable[[BisectStep], None]
) -> BisectResult:
    """Where ``releases``, the oldest first, turn from ``oldest`` to the other outcome.

    ``trial(release)`` runs one, ``told`` hears every step. The two ends are run first. Raises UsageError when they do
    not show what they should. A release that shows neither is stepped over, as git bisect does: its nearest neighbour
    is run instead.
    """
    newest = Outcome.BAD if oldest is Outcome.GOOD else Outcome.GOOD
    for release, expected in ((releases[0], oldest), (releases[-1], newest)):
        outcome, why = run_trial(release)
        on_step(BisectStep(release, outcome, why, max(0, len(releases) - 2)))
        if outcome is not expected:
            raise UsageError(
                f"{release} was named as {expected.value} and is {outcome.value}: {why}; "
                "name two releases between which it turns"
            )
    low, high, runs, skipped = 0, len(releases) - 1, 2, set[int]()
    while (middle := find_nearest(low, high, skipped)) is not None:
        outcome, why = run_trial(releases[middle])
        runs += 1
        if outcome is Outcome.SKIPPED:
            skipped.add(middle)
        elif outcome is oldest:
            low = middle
        else:
            high = middle
        on_step(BisectStep(releases[middle], outcome, why, sum(index not in skipped for index in range(low + 1, high))))
    between = tuple(releases[index] for index in range(low + 1, high))
    return BisectResult(releases[low], releases[high], newest, between, runs)


def find_nearest(low: int, high: int, skipped: set[int]) -> int | None:
    """The index between ``low`` and ``high`` that is nearest to their middle and not skipped, if any is left."""
    left = [index for index in range(low + 1, high) if index not in skipped]
    return min(left, key=lambda index: abs(2 * index - low - high), default=None)


def describe_step(step: BisectStep) -> str:
    """One line for a run."""
    left = f"{step.remaining} left between" if step.remaining else "none left between"
    why = step.reason if len(step.reason) <= MAX_REASON_LENGTH else f"{step.reason[:MAX_REASON_LENGTH]} ..."
    return f"{step.release}: {step.outcome.value} ({left}){why and f': {why}'}"


def describe_bisect_result(result: BisectResult) -> str:
    """The last line: where it turned, and after how many runs."""
    kind = "bad" if result.new_outcome is Outcome.BAD else "good"
    if result.skipped:
        several = ", ".join((*result.skipped, result.first_after))
        return f"the first {kind} release is one of {several} (those before the last show neither); {result.run_count} runs"
    return f"the first {kind} release is {result.first_after}; the one before, {result.last_before}, is not; {result.run_count} runs"
