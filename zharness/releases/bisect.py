"""Find by binary search the first release on which a law breaks, or holds again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from zharness.errors import UsageError

MAX_REASON_LENGTH = 120  # characters printed of a reason


class Outcome(Enum):
    """Whether one release has the bug."""

    GOOD = "good"
    BAD = "bad"
    SKIPPED = "skipped"  # it cannot be installed, or its run decides nothing


@dataclass(frozen=True)
class BisectStep:
    """One run: the release, its outcome and reason, and the number of releases left to try."""

    release: str
    outcome: Outcome
    reason: str
    remaining: int


@dataclass(frozen=True)
class BisectResult:
    """The two neighbouring releases between which the outcome changes.

    ``skipped`` are the releases between them that could not be judged; the change may be in any of them.
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
    """Find where ``releases`` (oldest first) change from the outcome ``oldest`` to the opposite one.

    ``run_trial(release)`` runs one release and returns its outcome and the reason; ``on_step`` is called after every
    run. The first and the last release are run first; raises UsageError if their outcomes are not ``oldest`` and the
    opposite. A release that cannot be judged is skipped as in git bisect: its nearest neighbour is run instead.
    """
    newest = Outcome.BAD if oldest is Outcome.GOOD else Outcome.GOOD
    for release, expected in ((releases[0], oldest), (releases[-1], newest)):
        outcome, reason = run_trial(release)
        on_step(BisectStep(release, outcome, reason, max(0, len(releases) - 2)))
        if outcome is not expected:
            raise UsageError(
                f"{release} was named as {expected.value} and is {outcome.value}: {reason}; "
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
    """Return the index nearest to the middle of ``low`` and ``high`` that is not skipped; None if there is none."""
    candidates = [index for index in range(low + 1, high) if index not in skipped]
    return min(candidates, key=lambda index: abs(2 * index - low - high), default=None)


def describe_step(step: BisectStep) -> str:
    """Return one line that describes a run."""
    remaining = f"{step.remaining} left between" if step.remaining else "none left between"
    reason = step.reason if len(step.reason) <= MAX_REASON_LENGTH else f"{step.reason[:MAX_REASON_LENGTH]} ..."
    return f"{step.release}: {step.outcome.value} ({remaining}){reason and f': {reason}'}"


def describe_bisect_result(result: BisectResult) -> str:
    """Return the final line: where the outcome changed, and the number of runs."""
    kind = "bad" if result.new_outcome is Outcome.BAD else "good"
    if result.skipped:
        candidates = ", ".join((*result.skipped, result.first_after))
        found = f"one of {candidates} (all but the last could not be judged)"
    else:
        found = f"{result.first_after}; the one before, {result.last_before}, is not"
    return f"the first {kind} release is {found}; {result.run_count} runs"
