"""A process that does not outlive the one that started it."""

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
    """Have the kernel send this process ``by`` when ``parent`` ends, however that ends.

    Linux only; elsewhere the rank server's own watch has to do. The parent may be gone already: then end at once.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent_pid:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of whatever a rank leaves behind, so that it can be waited for. Linux only."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_orphans(spared_pids: Collection[int | None]) -> None:
    """Kill and reap what this process has adopted, whatever session it made itself, but for ``keep``.

    The children of each fall to this process in turn, so it looks until there are none.
    """
    while strays := [pid for pid in find_living_children() if pid not in spared_pids]:
        for pid in strays:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def kill_process_group(leader_pid: int) -> None:
    """Kill what is left of a rank's process group, and reap what this process has adopted of it."""
    try:
        os.killpg(leader_pid, signal.SIGKILL)
        while True:
            os.waitpid(-leader_pid, 0)
    except (ProcessLookupError, PermissionError, ChildProcessError):
        return  # nothing is left, or nothing that is this process's to reap
