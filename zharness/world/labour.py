"""Whether ranks that seem to build or to import get on: a build computes, a stale lock is only looked at."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection
from pathlib import Path

IDLE = 30.0  # seconds in which a build may wait for a disk or a network before it counts as hung
BUSY = 0.5  # seconds of processor time, all ranks together, that are no mere looking at a lock


class Labour:
    """When some process groups were last seen to work, and what processor time they had used by then."""

    def __init__(self) -> None:
        self._seen = -math.inf
        self._used = -math.inf

    def goes_on(self, groups: Collection[int]) -> bool:
        """Whether they have computed within the last IDLE seconds; true at first, and where the system does not say."""
        now, used = time.monotonic(), processor_seconds(groups)
        if used is None or used >= self._used + BUSY:
            self._seen, self._used = now, used or 0.0
        return now < self._seen + IDLE


def processor_seconds(groups: Collection[int]) -> float | None:
    """What the living processes of these process groups have used, with their ended children; None without /proc."""
    if not Path("/proc/self/stat").exists():
        return None
    ticks = 0
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[2]) in groups:
            ticks += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime of proc(5)
    return ticks / os.sysconf("SC_CLK_TCK")
