"""How ranks share the machine's cores: which of them a lane keeps to, and who waits for whom there."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress


def assign_cores(lane: int, lane_count: int) -> frozenset[int]:
    """The one core of a lane, where there are lanes for every core that this process may use; else none, for any.

    Ranks of small models do little but wake each other up. On another core that is an interrupt, and where the core
    had gone to sleep a tenth of a millisecond; on their own it is a switch. So a lane on one core takes no longer than
    on two, and two lanes half as long.
    """
    if not hasattr(os, "sched_getaffinity"):
        return frozenset()
    usable = sorted(os.sched_getaffinity(0))
    return frozenset({usable[lane % len(usable)]}) if lane_count >= len(usable) else frozenset()


def pin_to_cores(cores: Collection[int], pid: int = 0) -> None:
    """Have a process, this one where none is named, and what it forks from now on run on these cores alone.

    As it does, where there are none; and where a container forbids it, or has taken a core away meanwhile.
    """
    if cores:
        with suppress(OSError):
            os.sched_setaffinity(pid, cores)


def use_batch_scheduling() -> None:
    """Have this process, and what it starts from now on, preempt nobody when it wakes up.

    Linux calls that a batch of work (sched(7), SCHED_BATCH). A thread of gloo that is woken by what another one sends
    would else take its core while that one holds the lock of the connection, and ask for it again and again until its
    own turn is over: 94 of 100 calls of epoll_wait, and a collective of two ranks takes 0.9 ms on one core where it
    takes 0.4 so, 1.5 where it takes 0.4 on two. A policy that somebody has chosen is left as it is.
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):  # a container may forbid it
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
