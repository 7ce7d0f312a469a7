"""Find out how the process of a rank that torchrun started has ended, from /proc or from faulthandler's dump."""

from __future__ import annotations

import signal
from pathlib import Path

from zharness.world.outcome import RankEnd, signal_name
from zharness.world.postmortem import CLOSED_PIPE_CAUSE, FATAL_ERROR_PREFIX

PROCESS_GONE_CAUSE = "its process has ended, and only torchrun has its exit status"


def read_process_end(pid: int) -> tuple[RankEnd, str] | None:
    """Return how a process ended, by a signal or with an exit status, as /proc reports it. Linux only.

    Returns None if the parent has already reaped the process, because /proc then has no entry for it.
    """
    try:
        status = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[-1])
    except (OSError, ValueError, IndexError):
        return None
    if is_process_alive(pid):
        return RankEnd.EXITED, f"it {CLOSED_PIPE_CAUSE}, and did not end"
    if status & 0x7F == signal.SIGTERM:
        return RankEnd.STOPPED, "SIGTERM from torchrun"
    if status & 0x7F:
        return RankEnd.SIGNALLED, signal_name(status & 0x7F)
    return RankEnd.EXITED, f"exit status {status >> 8}"


# faulthandler's names of the signals that it handles; since 3.13 "Floating-point".
_FATAL_SIGNALS = {
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL,
    "Floating point exception": signal.SIGFPE,
    "Aborted": signal.SIGABRT,
}


def parse_fatal_dump(dump: str) -> tuple[RankEnd, str]:
    """Return how a process ended, and the cause, from faulthandler's dump.

    The result is SIGNALLED and the signal that the dump names, or EXITED and ``PROCESS_GONE_CAUSE`` if the dump names
    no signal.
    """
    name = dump.rpartition(f"{FATAL_ERROR_PREFIX}: ")[2].partition("\n")[0].replace("-", " ")
    return (
        (RankEnd.SIGNALLED, _FATAL_SIGNALS[name].name)
        if name in _FATAL_SIGNALS
        else (RankEnd.EXITED, PROCESS_GONE_CAUSE)
    )


def is_process_alive(pid: int) -> bool:
    """Return whether a process is running. A zombie does not count as running."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
