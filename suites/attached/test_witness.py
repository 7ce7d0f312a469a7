"""How a witness finds out how a rank's process ended, before and after torchrun has reaped it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zharness.world.outcome import RankEnd
from zharness.world.process_end import PROCESS_GONE_CAUSE, parse_fatal_dump, read_process_end

LETHAL = [signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT]


pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="the exit status of other processes is read from /proc"
)


def run_to_end(code: str) -> tuple[int, int, str]:
    """Run Python code in a process that is reaped; return its process id, return code and standard error."""
    code = f"import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); {code}"
    with subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", code], stderr=subprocess.PIPE, text=True
    ) as process:
        _, errors = process.communicate()
    return process.pid, process.returncode, errors


@pytest.mark.parametrize("number", LETHAL, ids=lambda number: number.name)
def test_a_fatal_signal_is_parsed_from_the_stack_dump(number: signal.Signals) -> None:
    pid, status, dump = run_to_end(f"os.kill(os.getpid(), {int(number)})")
    assert status == -number
    assert read_process_end(pid) is None
    assert parse_fatal_dump(dump) == (RankEnd.SIGNALLED, number.name)


def test_an_end_without_a_stack_dump_is_known_to_torchrun_only() -> None:
    pid, status, dump = run_to_end("os._exit(5)")
    assert status == 5
    assert read_process_end(pid) is None
    assert parse_fatal_dump(dump) == (RankEnd.EXITED, PROCESS_GONE_CAUSE)


def test_the_exit_status_of_a_zombie_is_read_from_proc() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(5)
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert read_process_end(pid) == (RankEnd.EXITED, "exit status 5")
    finally:
        os.waitpid(pid, 0)
