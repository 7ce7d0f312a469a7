"""A program in a fork of the warm Python has the arguments, folder, streams, signals and exit status of a new Python.

What Python does at its start differs: imports, hash seeds, ``__main__``, and the frames above the program's own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from suites.warm import programs
from suites.warm.programs import Program

TELLS = """
import json, os, sys, tempfile
print("to errors", file=sys.stderr)
seen = [sys.argv, sys.path[0], os.getcwd(), os.environ["TMPDIR"], tempfile.gettempdir(), sorted(os.environ)]
print(json.dumps([*seen, sys.stdin.read(), __name__, os.getsid(0) == os.getpid()]))
sys.exit(3)
"""


@pytest.mark.parametrize("arguments", [("-c", TELLS), ("-m", "tells"), ("tells.py",)], ids=["code", "module", "script"])
def test_a_program_in_a_fork_sees_what_it_sees_in_a_new_python(arguments: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "tells.py").write_text(TELLS)
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PLANTED": "1"}
    forked = programs.run(*arguments, "--an-option", folder=tmp_path, environment=environment, stdin_text="typed\n")
    new = subprocess.run(
        [sys.executable, *arguments, "--an-option"],
        cwd=tmp_path,
        env=environment,
        input="typed\n",
        start_new_session=True,
        capture_output=True,
        text=True,
    )
    assert (forked.returncode, forked.stderr) == (new.returncode, new.stderr) == (3, "to errors\n")
    assert json.loads(forked.stdout) == json.loads(new.stdout)


@pytest.mark.parametrize(("code", "status"), [("pass", 0), ("1 / 0", 1), ("import os; os.abort()", -signal.SIGABRT)])
def test_the_return_code_of_a_program_is_that_of_subprocess(code: str, status: int) -> None:
    assert programs.run("-c", code).returncode == status


ENDS = {
    "text": "import sys; print('out'); sys.exit('a text')",
    "large status": "import sys; sys.exit(259)",
    "raises": "print('out'); raise ValueError('planted')",
    "thread": "import threading; threading.Timer(0.01, lambda: print('late')).start()",
    "exit function": "import atexit; atexit.register(print, 'last'); print('first')",
    "closed stream": "import sys; print('out'); sys.stdout.close()",
}


@pytest.mark.parametrize("code", ENDS.values(), ids=ENDS.keys())
def test_a_program_ends_in_a_fork_as_in_a_new_python(code: str) -> None:
    forked = programs.run("-c", code)
    new = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (forked.returncode, forked.stdout) == (new.returncode, new.stdout)
    assert forked.stderr.splitlines()[-1:] == new.stderr.splitlines()[-1:]


def test_unbuffered_output_is_there_after_the_program_dies() -> None:
    done = programs.run("-u", "-c", "import os, sys; print('seen'); print('told', file=sys.stderr); os._exit(7)")
    assert (done.returncode, done.stdout, done.stderr) == (7, "seen\n", "told\n")


STARTS = """
import os, subprocess, sys
command = [sys.executable, "-u", "-c", "import os, sys; print(os.getppid(), sys.argv); sys.exit(4)", "word"]
for _ in range(2):
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    parent, _, arguments = child.communicate()[0].partition(" ")
    print(int(parent) == os.getpid(), arguments.strip(), child.returncode)
"""


def test_a_spare_is_the_child_of_the_program_that_starts_it() -> None:
    """The first is a spare, the second a new Python."""
    done = programs.run("-c", STARTS, spares=1)
    assert done.stdout.splitlines() == ["True ['-c', 'word'] 4"] * 2, done.stderr


def test_processes_that_outlive_a_program_in_their_own_session_are_found_and_killed(tmp_path: Path) -> None:
    code = "import subprocess; print(subprocess.Popen(['tail', '-f', '/dev/null'], start_new_session=True, env={}).pid)"
    with (tmp_path / "output").open("w+b") as output:
        with Program(["-c", code], output, output) as program:
            assert program.wait() == 0
            pid = int(programs.read_output(output))
            assert program.wait_for_leftovers() == {pid: "tail -f /dev/null"}
        assert not program.find_descendants()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_reaches_the_program_alone(number: signal.Signals, tmp_path: Path) -> None:
    code = "import threading; print('ready', flush=True); threading.Event().wait()"
    with (tmp_path / "output").open("w+b") as output, Program(["-c", code], output, output) as program:
        while not programs.read_output(output) and program.poll() is None:
            os.sched_yield()
        program.send_signal(number)
        assert program.wait() == -number
        assert not program.wait_for_leftovers()
