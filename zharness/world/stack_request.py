"""Make processes write their stacks by sending SIGUSR1, and wait until the stacks are complete."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

STACK_DUMP_SECONDS = 0.5  # time for a process to write its stacks, if the kernel does not show whether it is writing
BUSY_DUMP_SECONDS = 10.0  # time for a process that is still writing: a busy machine may not run it for seconds
_READ_INTERVAL_SECONDS = 0.02
_SIGNAL_BIT = 1 << (signal.SIGUSR1 - 1)


@dataclass(frozen=True)
class StackRequest:
    """A request to a process to write its stacks.

    ``was_blocked`` says whether the main thread blocked SIGUSR1 when the request was sent; then the kernel does not
    show when the stacks are complete. The kernel does not show it either if another thread takes the signal, which may
    happen while the main thread handles an earlier signal.
    """

    pid: int
    was_blocked: bool


@dataclass(frozen=True)
class SignalState:
    """The state of SIGUSR1 in the main thread of a process, as /proc shows it."""

    is_pending: bool
    is_blocked: bool


def request_stacks(pid: int) -> StackRequest:
    """Send SIGUSR1 to a process, whose faulthandler then writes its stacks. Raises ProcessLookupError."""
    state = read_signal_state(pid)
    os.kill(pid, signal.SIGUSR1)
    return StackRequest(pid, state is None or state.is_blocked)


def is_writing_stacks(request: StackRequest) -> bool:
    """Return whether the kernel shows that the process has not handled SIGUSR1 yet or is handling it.

    The kernel blocks a signal while its handler runs, so a signal that is neither pending nor blocked has been handled.
    """
    state = None if request.was_blocked else read_signal_state(request.pid)
    return state is not None and (state.is_pending or state.is_blocked)


def read_signal_state(pid: int) -> SignalState | None:
    """Return the state of SIGUSR1 in a process; None if it has ended, is stopped, or the system has no /proc."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    if fields["State"][0] in "TtXZ":
        return None
    pending = int(fields["SigPnd"], 16) | int(fields["ShdPnd"], 16)
    return SignalState(bool(pending & _SIGNAL_BIT), bool(int(fields["SigBlk"], 16) & _SIGNAL_BIT))


def wait_for_stacks(
    requests: Collection[StackRequest],
    read_stacks: Callable[[], Mapping[int, str]],
    pause: Callable[[float], None],
) -> dict[int, str]:
    """Return the stacks that the processes have written, by rank, as soon as the stacks are complete.

    ``read_stacks`` reads the stacks that have been written so far, by rank; ``pause`` waits for a number of seconds.
    """
    started_at, stacks = time.monotonic(), dict[int, str]()
    while True:
        pause(_READ_INTERVAL_SECONDS)
        is_writing = any(map(is_writing_stacks, requests))  # ask before reading, so that the text read is complete
        current, seconds = dict(read_stacks()), time.monotonic() - started_at
        is_whole = not is_writing and all(current.values()) and current == stacks
        if is_whole or seconds > (BUSY_DUMP_SECONDS if is_writing else STACK_DUMP_SECONDS):
            return current
        stacks = current
