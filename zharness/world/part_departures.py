"""Detect that ranks wait forever for a rank that has ended a part of their task, such as a Hypothesis example."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from zharness.world.deadline import GRACE_SECONDS, LAST_GRACE_SECONDS
from zharness.world.messages import RankStatus
from zharness.world.progress import processor_seconds
from zharness.world.stacks import StackFrame, find_waiting_collective, is_building

CHECK_SECONDS = 0.25  # interval between two checks of the ranks that have not ended the part
MAX_IDLE_CPU_SECONDS = 0.05  # processor time of all ranks together between two checks, below which all ranks wait
# The number of checks in a row that must find the same standstill. After a return, the verdict depends on this number,
# so it is larger; after a failure, the part has failed in any case.
STILL_CHECKS, STILL_CHECKS_AFTER_RETURN = 1, 8


class PartDepartures:
    """The ranks that wait in an exchange because they have ended a part of the task."""

    def __init__(self) -> None:
        self._statuses: dict[int, RankStatus] = {}
        self._first_at = 0.0
        self._last_sites: dict[int, str] = {}
        self._last_cpu_seconds: float | None = None
        self._still_checks = 0

    def __bool__(self) -> bool:
        """Return whether any rank waits for other ranks to end the part."""
        return bool(self._statuses)

    def add(self, rank: int, status: RankStatus) -> None:
        """Add a rank that has ended the part by a failure (PART_FAILED), another exception (PART_LEFT) or a return."""
        if not self._statuses:
            self._first_at = time.monotonic()
        self._statuses[rank] = status
        self._last_sites = {}

    def remove(self, rank: int) -> None:
        """Remove the departure of ``rank``, if it has one, because the rank continues its task."""
        self._statuses.pop(rank, None)
        self._last_sites = {}

    def clear(self) -> None:
        """Remove all departures, because every rank has ended the part."""
        self._statuses, self._last_sites = {}, {}

    def block_others(self, frames: Mapping[int, tuple[StackFrame, ...]], processes: Collection[int]) -> bool:
        """Return whether the ranks that have not ended the part will never end it; ``frames`` are their stacks.

        They are blocked if all of them wait in the same collectives as at the last check, and ``processes``, those of
        all running ranks, have used almost no CPU time since then. If no rank has ended the part by an exception, this
        must hold at eight checks in a row. After a failure, the part fails in any case. So the other ranks are also
        blocked if they have not ended the part within the grace period of a failed task and do not build an operator.
        """
        if not frames or not self._statuses:
            return False
        sites = {rank: find_waiting_collective(stack) for rank, stack in frames.items()}
        used, is_same = processor_seconds(processes), sites == self._last_sites
        is_idle = (
            used is not None
            and self._last_cpu_seconds is not None
            and used - self._last_cpu_seconds < MAX_IDLE_CPU_SECONDS
        )
        self._last_sites, self._last_cpu_seconds = sites, used
        self._still_checks = self._still_checks + 1 if all(sites.values()) and is_same and is_idle else 0
        has_failure = RankStatus.PART_FAILED in self._statuses.values()
        is_late = time.monotonic() > self._first_at + GRACE_SECONDS + LAST_GRACE_SECONDS
        if has_failure and is_late and not any(map(is_building, frames.values())):
            return True
        have_returned = set(self._statuses.values()) == {RankStatus.PART_ENDED}
        return self._still_checks >= (STILL_CHECKS_AFTER_RETURN if have_returned else STILL_CHECKS)
