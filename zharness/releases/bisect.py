"""Find, by binary search, the first release on which a law is broken, or on which a broken law holds again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from zharness.errors import UsageError

MAX_REASON_LENGTH = 120  # characters of a reason that are printed


class Outcome(Enum):
    """The outcome of testing one release: the bug is absent, the bug is present, or the release was skipped."""

    GOOD = "good"
    BAD = "bad"
    SKIPPED = "skipped"  # it cannot be installed, or its run decides nothing


@dataclass(frozen=True)
class BisectStep:
    """One run of a bisection: the release, its outcome, and the reason for this outcome.

    ``remaining`` is the number of releases that are left to try.
    """

    release: str
    outcome: Outcome
    reason: str
    remaining: int


@dataclass(frozen=True)
class BisectResult:
    """The two releases between which the outcome changes.

    ``skipped`` lists the releases between the two that could not be judged; the outcome may have changed in any of
    them. ``new_outcome`` is the outcome of ``first_after``.
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
    """Find where ``releases`` (oldest first) change from the outcome ``oldest`` to the opposite outcome.

    ``run_trial(release)`` runs one release and returns its outcome and the reason; ``on_step`` is called after every
    run. The first and the last release are run first. Raises UsageError unless the first release has the outcome
    ``oldest`` and the last release has the opposite outcome. A release that cannot be judged is skipped as in git
    bisect: its nearest neighbour is run instead.
    """
    newest = Outcome.BAD if oldest is Outcome.GOOD else Outcome.GOOD
    for release, expected in ((releases[0], oldest), (releases[-1], newest)):
        outcome, reason = run_trial(release)
        on_step(BisectStep(release, outcome, reason, max(0, len(releases) - 2)))
        if outcome is not expected:
            raise UsageError(
                f"{release} was given as {expected.value}, but is {outcome.value}{reason and f': {reason}'}; "
                "name two releases between which the outcome changes"
            )
    low, high, runs, skipped = 0, len(releases) - 1, 2, set[int]()
    while (middle := find_nearest(low, high, skipped)) is not None:
        outcome, reason = run_trial(releases[middle])
        runs += 1
        if outcome is Outcome.SKIPPED:
            skipped.add(middle)
        elif outcome is oldest:
            low = middle
        else:
            high = middle
        on_step(
            BisectStep(releases[middle], outcome, reason, sum(index not in skipped for index in range(low + 1, high)))
        )
    between = tuple(releases[index] for index in range(low + 1, high))
    return BisectResult(releases[low], releases[high], newest, between, runs)


def find_nearest(low: int, high: int, skipped: set[int]) -> int | None:
    """Return the index between ``low`` and ``high`` that is nearest to their middle and not in ``skipped``.

    Return None if all indices between ``low`` and ``high`` are in ``skipped``.
    """
    candidates = [index for index in range(low + 1, high) if index not in skipped]
    return min(candidates, key=lambda index: abs(2 * index - low - high), default=None)


def describe_step(step: BisectStep) -> str:
    """Return one line with the release of a run, its outcome, and the number of releases left to try."""
    remaining = f"{step.remaining} left between" if step.remaining else "none left between"
    reason = step.reason if len(step.reason) <= MAX_REASON_LENGTH else f"{step.reason[:MAX_REASON_LENGTH]} ..."
    return f"{step.release}: {step.outcome.value} ({remaining}){reason and f': {reason}'}"


def describe_bisect_result(result: BisectResult) -> str:
    """Return the line that names the release in which the outcome changed, and the number of runs."""
    kind = "bad" if result.new_outcome is Outcome.BAD else "good"
    if result.skipped:
        candidates = ", ".join((*result.skipped, result.first_after))
        found = f"one of {candidates} (all but the last could not be judged)"
    else:
        found = f"{result.first_after}; the one before, {result.last_before}, is not"
    return f"the first {kind} release is {found}; {result.run_count} runs"
