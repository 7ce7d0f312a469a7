"""Distinguish slow builds from hung builds by CPU time: compiling uses CPU time, waiting for a lock does not."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection
from pathlib import Path

MAX_IDLE_SECONDS = 30.0  # time that a build may wait for a disk or a network before it counts as hung
MIN_CPU_SECONDS = 0.5  # processor time, all ranks together, that is more than polling for a lock needs


class ProgressMonitor:
    """Measures whether process groups make progress, by the growth of the CPU time that they have used."""

    def __init__(self) -> None:
        self._last_progress = -math.inf
        self._cpu_seconds = -math.inf

    def is_progressing(self, process_groups: Collection[int]) -> bool:
        """Return whether the groups used CPU time within the last ``MAX_IDLE_SECONDS``.

        The first call returns True, and so does every call on a system without /proc.
        """
        now, used = time.monotonic(), processor_seconds(process_groups)
        if used is None or used >= self._cpu_seconds + MIN_CPU_SECONDS:
            self._last_progress, self._cpu_seconds = now, used or 0.0
        return now < self._last_progress + MAX_IDLE_SECONDS


def processor_seconds(process_groups: Collection[int]) -> float | None:
    """Return the CPU seconds of the groups' living processes and of their reaped children, or None without /proc."""
    if not Path("/proc/self/stat").exists():
        return None
    ticks = 0
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # the process ended meanwhile
        if int(fields[2]) in process_groups:
            ticks += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime of proc(5)
    return ticks / os.sysconf("SC_CLK_TCK")
