"""Compute the deadline of one task: a failure shortens it, a build extends it, and a debugger suspends it."""

from __future__ import annotations

import math
import time

GRACE_SECONDS = 0.5  # time for the other ranks to end by themselves once one rank has failed
LAST_GRACE_SECONDS = 0.8  # further time for a rank outside of any collective: it may be rendering its own failure
RECHECK_SECONDS = 0.5  # interval between two checks of a rank that builds or imports
BUILD_LIMIT_SECONDS = 600.0  # time that builds and first imports may take on top of the time-out


class Deadline:
    """The time by which a task has to end.

    A failure of a rank makes the deadline earlier, a build makes it later, and a debugger suspends it. Infinite seconds
    mean no deadline.
    """

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
        """Return the number of seconds until the ranks have to be checked.

        Returns None while a rank is in a debugger, and for a task without a time limit.
        """
        next_at = min(self._ends_at, self._next_check)
        return None if self._held_ranks or math.isinf(next_at) else max(0.0, next_at - time.monotonic())

    def is_over(self) -> bool:
        """Return whether the deadline has passed. Times that ``schedule_check`` has set do not matter here."""
        return time.monotonic() >= self._ends_at

    def shorten(self, seconds: float) -> None:
        """Move the deadline to at most ``seconds`` from now, because a rank has failed."""
        now = time.monotonic()
        self._cut_at = min(self._cut_at, now)
        self._ends_at = min(self._ends_at, now + seconds)

    def restore(self) -> bool:
        """Undo ``shorten``: move the deadline back to the original time-out. Returns True on the first call only."""
        first, self._was_restored = not self._was_restored, True
        self._ends_at = max(self._started_at + self._seconds, time.monotonic())
        return first

    def grant_last_grace(self) -> bool:
        """Move a shortened deadline to half of ``GRACE_SECONDS`` from now, and return True.

        Returns False, and changes nothing, if the deadline was not shortened or if ``LAST_GRACE_SECONDS`` have passed
        since it was shortened.
        """
        now = time.monotonic()
        if now >= self._cut_at + LAST_GRACE_SECONDS or math.isinf(self._cut_at):
            return False
        self._ends_at = now + GRACE_SECONDS / 2
        return True

    def schedule_check(self, seconds: float) -> None:
        """Schedule a check of the ranks: after ``seconds``, ``remaining_seconds`` returns 0."""
        self._next_check = time.monotonic() + seconds

    def extend(self, is_building: bool) -> bool:
        """Extend the deadline while a rank builds an operator or imports a module; return whether it was extended.

        ``is_building`` says whether a rank is building or importing now. After the build, the deadline is extended once
        more, by the whole time-out. Builds may take at most ``BUILD_LIMIT_SECONDS`` on top of the time-out.
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
        """Suspend the deadline because ``rank`` is in a debugger, or resume the deadline if ``reason`` is empty.

        A resumed deadline is a whole time-out from now, or ``GRACE_SECONDS`` from now if a rank has failed.
        """
        if reason:
            self._held_ranks.add(rank)
        elif rank in self._held_ranks:
            self._held_ranks.remove(rank)
            self._ends_at = time.monotonic() + (GRACE_SECONDS if math.isfinite(self._cut_at) else self._seconds)
