"""The stacks of a process are read when they are whole, however slowly the machine runs the process."""

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from zharness.world.stack_request import (
    StackRequest,
    is_writing_stacks,
    read_signal_state,
    request_stacks,
    wait_for_stacks,
)
from zharness.world.store import pause

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@contextmanager
def child_that_waits(prepare: Callable[[], None]) -> Iterator[int]:
    """Fork a process that calls ``prepare`` and then waits for ever; give its process id, and kill it afterwards."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            prepare()
            os.write(writer, b"ready")
            threading.Event().wait()
        finally:
            os._exit(1)  # the child has pytest's stack, which it must not unwind
    os.close(writer)
    greeting = os.read(reader, 5)
    os.close(reader)
    assert greeting == b"ready", "the child ended before it waited"
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_two_equal_reads_are_not_the_end_of_the_stacks() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)  # the handler now waits in its first write until the pipe is read
    os.set_blocking(reader, False)
    early_reads, text = ["", "Thread 1", "Thread 1", "Thread 1"], bytearray()

    def read_stacks() -> dict[int, str]:
        if early_reads:
            return {0: early_reads.pop(0)}
        with suppress(BlockingIOError):
            text.extend(os.read(reader, 1 << 20))
        return {0: text.decode()}

    with child_that_waits(lambda: faulthandler.register(signal.SIGUSR1, file=writer)) as pid:
        stacks = wait_for_stacks([request_stacks(pid)], read_stacks, pause)
    os.close(reader)
    os.close(writer)
    assert "in child_that_waits" in stacks[0]


def test_a_stopped_process_is_not_waited_for() -> None:
    with child_that_waits(lambda: None) as pid:
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        assert read_signal_state(pid) is None


def block_the_signal() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})


def test_a_process_that_blocks_the_signal_is_not_waited_for() -> None:
    with child_that_waits(block_the_signal) as pid:
        request = request_stacks(pid)
        assert request.was_blocked
        assert not is_writing_stacks(request)


def test_a_signal_that_is_pending_or_being_handled_counts_as_writing() -> None:
    with child_that_waits(block_the_signal) as pid:  # the kernel shows a handler that runs as a blocked signal
        assert is_writing_stacks(StackRequest(pid, was_blocked=False))


def test_a_process_that_has_ended_is_not_writing() -> None:
    with child_that_waits(lambda: None) as pid:
        pass
    assert not is_writing_stacks(StackRequest(pid, was_blocked=False))
    with pytest.raises(ProcessLookupError):
        request_stacks(pid)
