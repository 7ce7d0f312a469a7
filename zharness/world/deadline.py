"""When to stop waiting for ranks."""

from __future__ import annotations

import math
import time

GRACE_SECONDS = 0.5  # seconds that the other ranks get to end by themselves once one has failed
LAST_GRACE_SECONDS = 0.8  # seconds for a rank that waits for nobody: it may be putting a failure of its own into words
RECHECK_SECONDS = 0.5  # seconds between two looks at a rank that builds or imports
BUILD_LIMIT_SECONDS = 600.0  # seconds that builds and first imports may take on top of the time-out


class Deadline:
    """The end of the waiting: cut short by a failure, put off by builds, switched off while a person looks."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._started_at = time.monotonic()
        self._ends_at = self._started_at + seconds
        self._cut_at = math.inf
        self._next_check = math.inf
        self._held_ranks: set[int] = set()
        self._was_building = False
        self._was_restored = False

    def remaining_seconds(self) -> float | None:
        """Seconds until something has to be looked at; None while a person looks at a rank."""
        if self._held_ranks:
            return None
        return max(0.0, min(self._ends_at, self._next_check) - time.monotonic())

    def is_over(self) -> bool:
        """Whether the time is up, rather than only the time for a look."""
        return time.monotonic() >= self._ends_at

    def shorten(self, seconds: float) -> None:
        """End in at most that many seconds."""
        now = time.monotonic()
        self._cut_at = min(self._cut_at, now)
        self._ends_at = min(self._ends_at, now + seconds)

    def restore(self) -> bool:
        """Give back, once, the time that a failure took away; false the second time."""
        first, self._was_restored = not self._was_restored, True
        self._ends_at = max(self._started_at + self._seconds, time.monotonic())
        return first

    def grant_last_grace(self) -> bool:
        """Put an end that a failure cut short off once more: false when the ranks have had all of their time."""
        now = time.monotonic()
        if now >= self._cut_at + LAST_GRACE_SECONDS or math.isinf(self._cut_at):
            return False
        self._ends_at = now + GRACE_SECONDS / 2
        return True

    def schedule_check(self, seconds: float) -> None:
        """Have the ranks looked at in that many seconds."""
        self._next_check = time.monotonic() + seconds

    def extend(self, is_building: bool) -> bool:
        """Put the end off while an engine is built or a module imported, and once by the whole time-out afterwards.

        False when there is no reason to, or when building has taken longer than anything that was ever built here.
        """
        if is_building and time.monotonic() < self._started_at + self._seconds + BUILD_LIMIT_SECONDS:
            self._was_building = True
            self._ends_at = time.monotonic() + RECHECK_SECONDS
            return True
        if self._was_building:
            self._was_building = False
            self._ends_at = time.monotonic() + self._seconds
            return True
        return False

    def hold(self, rank: int, reason: str) -> None:
        """Off while ``reason`` is not empty; afterwards the time starts anew, unless a failure has cut it short."""
        if reason:
            self._held_ranks.add(rank)
        elif rank in self._held_ranks:
            self._held_ranks.remove(rank)
            self._ends_at = time.monotonic() + (GRACE_SECONDS if math.isfinite(self._cut_at) else self._seconds)
