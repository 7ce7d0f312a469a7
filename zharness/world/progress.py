"""Whether ranks that seem to build or to import get on: a build computes, a stale lock is only looked at."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection
from pathlib import Path

MAX_IDLE_SECONDS = 30.0  # seconds in which a build may wait for a disk or a network before it counts as hung
MIN_CPU_SECONDS = 0.5  # seconds of processor time, all ranks together, that are no mere looking at a lock


class ProgressMonitor:
    """When some process groups were last seen to work, and what processor time they had used by then."""

    def __init__(self) -> None:
        self._last_progress = -math.inf
        self._cpu_seconds = -math.inf

    def is_progressing(self, process_groups: Collection[int]) -> bool:
        """Whether they have computed within the last IDLE seconds; true at first, and where the system does not say."""
        now, used = time.monotonic(), processor_seconds(process_groups)
        if used is None or used >= self._cpu_seconds + MIN_CPU_SECONDS:
            self._last_progress, self._cpu_seconds = now, used or 0.0
        return now < self._last_progress + MAX_IDLE_SECONDS


def processor_seconds(process_groups: Collection[int]) -> float | None:
    """What the living processes of these process groups have used, with their ended children; None without /proc."""
    if not Path("/proc/self/stat").exists():
        return None
    ticks = 0
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[2]) in process_groups:
            ticks += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime of proc(5)
    return ticks / os.sysconf("SC_CLK_TCK")
