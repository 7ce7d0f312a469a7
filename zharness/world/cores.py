"""Set the CPU affinity and the scheduling policy of ranks."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress


def assign_cores(lane: int, lane_count: int) -> frozenset[int]:
    """Return a set with the one core to which lane number ``lane`` has to be pinned.

    Returns the empty set if there are fewer lanes than cores, or if the system cannot pin processes to cores. A lane is
    one of several cells that run at the same time.

    The ranks of a small model spend most of their time waking each other up. Waking a process on another core needs an
    interrupt (0.1 ms if that core sleeps); waking a process on the same core needs a context switch. So a lane is as
    fast on one core as on two, and two cores that each run one lane finish the same cells in half the time.
    """
    if not hasattr(os, "sched_getaffinity"):
        return frozenset()
    usable = sorted(os.sched_getaffinity(0))
    return frozenset({usable[lane % len(usable)]}) if lane_count >= len(usable) else frozenset()


def pin_to_cores(cores: Collection[int], pid: int = 0) -> None:
    """Pin process ``pid`` and the children that it forks from now on to ``cores``. A ``pid`` of 0 is this process.

    If ``cores`` is empty, the function does nothing, and the cores of an earlier call remain in effect.
    """
    if cores:
        with suppress(OSError):  # a container may forbid it, or may have lost one of the cores
            os.sched_setaffinity(pid, cores)


def use_batch_scheduling() -> None:
    """Set the scheduling policy SCHED_BATCH for this process and its future children.

    With this policy, a thread that wakes up does not preempt the running thread. With the default policy, a woken gloo
    thread preempts the sender, which still holds the lock of the connection, and polls for that lock until its time
    slice ends (94 of 100 calls of epoll_wait were such polls). A collective of two ranks then takes 0.9 ms on one core
    and 1.5 ms on two; with SCHED_BATCH it takes 0.4 ms. If the process has a policy other than the default, the
    function does not change it. See sched(7).
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):  # a container may forbid it
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
