"""Which of the machine's cores a lane of work keeps to."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress


def share(lane: int, lanes: int) -> frozenset[int]:
    """The one core of a lane, where there are lanes for every core that this process may use; else none, for any.

    Ranks of small models do little but wake each other up. On another core that is an interrupt, and where the core
    had gone to sleep a tenth of a millisecond; on their own it is a switch. So a lane on one core takes no longer than
    on two, and two lanes half as long.
    """
    if not hasattr(os, "sched_getaffinity"):
        return frozenset()
    usable = sorted(os.sched_getaffinity(0))
    return frozenset({usable[lane % len(usable)]}) if lanes >= len(usable) else frozenset()


def keep_to(cores: Collection[int], pid: int = 0) -> None:
    """Have a process, this one where none is named, and what it forks from now on run on these cores alone.

    As it does, where there are none; and where a container forbids it, or has taken a core away meanwhile.
    """
    if cores:
        with suppress(OSError):
            os.sched_setaffinity(pid, cores)
