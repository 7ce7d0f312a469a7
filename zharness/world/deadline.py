"""When to stop waiting for ranks."""

from __future__ import annotations

import math
import time

GRACE = 0.5  # seconds that the other ranks get to end by themselves once one has failed
LAST_GRACE = 0.8  # seconds for a rank that waits for nobody: it may be putting a failure of its own into words
RECHECK = 0.5  # seconds between two looks at a rank that builds or imports
BUILD_LIMIT = 600.0  # seconds that builds and first imports may take on top of the time-out


class Deadline:
    """The end of the waiting: cut short by a failure, put off by builds, switched off while a person looks."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began = time.monotonic()
        self._end = self._began + seconds
        self._cut_at = math.inf
        self._next_look = math.inf
        self._holds: set[int] = set()
        self._was_building = False
        self._restored = False

    def remaining(self) -> float | None:
        """Seconds until something has to be looked at; None while a person looks at a rank."""
        if self._holds:
            return None
        return max(0.0, min(self._end, self._next_look) - time.monotonic())

    def is_over(self) -> bool:
        """Whether the time is up, rather than only the time for a look."""
        return time.monotonic() >= self._end

    def cut(self, seconds: float) -> None:
        """End in at most that many seconds."""
        now = time.monotonic()
        self._cut_at = min(self._cut_at, now)
        self._end = min(self._end, now + seconds)

    def restore(self) -> bool:
        """Give back, once, the time that a failure took away; false the second time."""
        first, self._restored = not self._restored, True
        self._end = max(self._began + self._seconds, time.monotonic())
        return first

    def spare(self) -> bool:
        """Put an end that a failure cut short off once more: false when the ranks have had all of their time."""
        now = time.monotonic()
        if now >= self._cut_at + LAST_GRACE or math.isinf(self._cut_at):
            return False
        self._end = now + GRACE / 2
        return True

    def look_in(self, seconds: float) -> None:
        """Have the ranks looked at in that many seconds."""
        self._next_look = time.monotonic() + seconds

    def extend(self, building: bool) -> bool:
        """Put the end off while an engine is built or a module imported, and once by the whole time-out afterwards.

        False when there is no reason to, or when building has taken longer than anything that was ever built here.
        """
        if building and time.monotonic() < self._began + self._seconds + BUILD_LIMIT:
            self._was_building = True
            self._end = time.monotonic() + RECHECK
            return True
        if self._was_building:
            self._was_building = False
            self._end = time.monotonic() + self._seconds
            return True
        return False

    def hold(self, rank: int, reason: str) -> None:
        """Off while ``reason`` is not empty; afterwards the time starts anew, unless a failure has cut it short."""
        if reason:
            self._holds.add(rank)
        elif rank in self._holds:
            self._holds.remove(rank)
            self._end = time.monotonic() + (GRACE if math.isfinite(self._cut_at) else self._seconds)
