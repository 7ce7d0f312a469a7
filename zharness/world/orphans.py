"""Kill the processes that a rank started and left running, and make a child process end when its parent ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Collection
from contextlib import suppress

from zharness.world.leftovers import find_living_children

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent_pid: int, signal_number: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send ``signal_number`` to this process when its parent ends for any reason.

    If ``parent_pid`` is no longer the parent, this process exits at once. On systems other than Linux the function does
    nothing; there, a rank ends when it finds its control pipe closed.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent_pid:
        os._exit(1)


def adopt_orphans() -> None:
    """Make this process the parent of its orphaned descendants, so that it can wait for their end. Linux only."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_orphans(spared_pids: Collection[int | None]) -> None:
    """Kill and reap all children of this process except ``spared_pids``, even children that run in their own sessions.

    The children of a killed process become children of this process, so the function repeats until none are left.
    """
    while orphans := [pid for pid in find_living_children() if pid not in spared_pids]:
        for pid in orphans:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def kill_process_group(leader_pid: int) -> None:
    """Kill the remaining processes of a rank's process group, and reap those that are children of this process."""
    try:
        os.killpg(leader_pid, signal.SIGKILL)
        while True:
            os.waitpid(-leader_pid, 0)
    except (ProcessLookupError, PermissionError, ChildProcessError):
        return  # no process is left, or no child of this process is left
