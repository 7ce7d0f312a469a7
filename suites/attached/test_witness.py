"""How a witness names the end of a rank for which the launcher has waited already."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zharness.world.outcome import RankEnd
from zharness.world.witness import PROCESS_GONE_CAUSE, parse_fatal_dump, read_process_end

LETHAL = [signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT]


pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="how others ended is read in /proc")


def ended(code: str) -> tuple[int, int, str]:
    """A process that ran the code and was waited for: its number, its status, and what it wrote on standard error."""
    code = f"import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); {code}"
    with subprocess.Popen([sys.executable, "-X", "faulthandler", "-c", code], stderr=subprocess.PIPE, text=True) as one:
        _, said = one.communicate()
    return one.pid, one.returncode, said


@pytest.mark.parametrize("number", LETHAL, ids=lambda number: number.name)
def test_a_fatal_signal_is_read_in_the_stack_that_it_left(number: signal.Signals) -> None:
    pid, status, dump = ended(f"os.kill(os.getpid(), {int(number)})")
    assert status == -number
    assert read_process_end(pid) is None
    assert parse_fatal_dump(dump) == (RankEnd.SIGNALLED, number.name)


def test_an_end_that_left_no_stack_is_the_launcher_s_to_tell() -> None:
    pid, status, dump = ended("os._exit(5)")
    assert status == 5
    assert read_process_end(pid) is None
    assert parse_fatal_dump(dump) == (RankEnd.EXITED, PROCESS_GONE_CAUSE)


def test_the_status_of_an_end_is_read_before_anybody_has_waited_for_it() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(5)
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert read_process_end(pid) == (RankEnd.EXITED, "exit status 5")
    finally:
        os.waitpid(pid, 0)
