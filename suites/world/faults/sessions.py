"""pytest sessions in processes of their own: their reports are recorded, and processes that they leave are found."""

from __future__ import annotations

import json
import os
import signal
import textwrap
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from suites import inner
from suites.warm.programs import LEFTOVER_TIMEOUT, Program

# A conftest.py that records what pytest logs and when, in the session's own process only (ranks are forks of it). At
# the next test it waits for the processes whose ids the last test noted, and records those that are still alive.
RECORDER = """
import json, os, threading, time
from pathlib import Path

ME, RECORD, NOTES = os.getpid(), Path(__file__).with_name("record.jsonl"), Path(__file__).with_name("notes")

def record(**what):
    if os.getpid() == ME:
        with RECORD.open("a") as file:
            file.write(json.dumps({"at": time.monotonic(), **what}) + "\\n")

def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

def pytest_configure(config):
    if hasattr(config, "workerinput"):
        global record
        record = lambda **what: None

def pytest_runtest_logstart(nodeid):
    if os.getpid() == ME:
        began = time.monotonic()
        pids = [int(line) for file in NOTES.glob("*.pids") for line in file.read_text().split()]
        while any(map(alive, pids)) and time.monotonic() < began + GONE:
            threading.Event().wait(0.02)
        record(kind="left", pids=[pid for pid in pids if alive(pid)], seconds=time.monotonic() - began)
        for file in NOTES.glob("*.pids"):
            file.unlink()
    record(kind="start", nodeid=nodeid)

def pytest_runtest_logfinish(nodeid):
    record(kind="finish", nodeid=nodeid)

def pytest_runtest_logreport(report):
    crash = getattr(report.longrepr, "reprcrash", None)
    record(
        kind="report", nodeid=report.nodeid, when=report.when, outcome=report.outcome, text=report.longreprtext,
        headline=getattr(crash, "message", report.longreprtext), sections=report.sections,
        wasxfail=getattr(report, "wasxfail", None), duration=report.duration,
    )
"""


@dataclass(frozen=True)
class Report:
    """One report as pytest logged it. ``headline`` is the message that the short summary shows."""

    when: str
    outcome: str
    headline: str
    text: str
    sections: tuple[tuple[str, str], ...]
    wasxfail: str | None


@dataclass
class RecordedTest:
    """What was logged about one test.

    ``leftover_pids`` are the processes that it noted and that outlived it by ``LEFTOVER_TIMEOUT``.
    """

    reports: list[Report] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0
    leftover_pids: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """Return the seconds from the start of the test to the last report about it."""
        return self.ended - self.began

    def outcome(self, when: str) -> str | None:
        """Return the outcome of one phase, joined by commas if it has several reports; None without a report."""
        return ", ".join(report.outcome for report in self.reports if report.when == when) or None


@dataclass(frozen=True)
class SessionResult:
    """The result of a session that has ended; ``tests`` by the last part of their ids."""

    status: int
    output: str
    tests: Mapping[str, RecordedTest]
    seconds: float
    leftovers: tuple[str, ...]

    def verdicts(self) -> dict[str, str]:
        """Return for every test ``passed``, or its first phase that did not pass with the outcome: ``call failed``."""
        return {
            name: next((f"{r.when} {r.outcome}" for r in test.reports if r.outcome != "passed"), "passed")
            for name, test in self.tests.items()
        }


def start_pytest(
    folder: Path, arguments: Sequence[str], variables: Mapping[str, str], typed: str = "", spares: int = 0
) -> Program:
    """Start a pytest session in ``folder``; its output goes to ``output.txt`` there.

    It gets this process's environment without the variables of pytest and zharness, and ``variables``.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "ZHARNESS"))}
    with (folder / "output.txt").open("wb") as output:
        command = ("-m", "pytest", *arguments)
        return Program(command, output, output, folder, {**environment, **variables}, stdin_text=typed, spares=spares)


class Session:
    """A running pytest session over ``files`` in ``folder``, with a temporary directory of its own.

    ``spares`` is the number of xdist workers that are forks of the warm Python, ``variables`` are environment
    variables, and ``settings`` further lines of its pytest.ini.
    """

    def __init__(
        self,
        folder: Path,
        files: Mapping[str, str],
        *arguments: str,
        spares: int = 0,
        variables: Mapping[str, str] | None = None,
        settings: str = "",
    ) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True, exist_ok=True)
        (folder / "notes").mkdir(exist_ok=True)
        (folder / "record.jsonl").unlink(missing_ok=True)  # of a session before this one
        (folder / "pytest.ini").write_text(f"{inner.settings(*files.values())}{settings}")
        (folder / "conftest.py").write_text(RECORDER.replace("GONE", str(LEFTOVER_TIMEOUT)))
        for name, text in files.items():
            (folder / name).write_text(textwrap.dedent(text))
        command = [f"--basetemp={folder / 'base'}", *arguments]
        self._began = time.monotonic()
        variables = {"TMPDIR": str(self.temporary), "COLUMNS": "200", **(variables or {})}
        self._program = start_pytest(folder, command, variables, spares=spares)
        self.pid = self._program.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the pytest process only."""
        self._program.send_signal(number)

    def finish(self) -> SessionResult:
        """Wait until the session and everything that it started have ended; return the result."""
        with self._program as program:
            status = program.wait()
            seconds = time.monotonic() - self._began
            leftovers = tuple(self._wait_for_leftovers())
        output = (self.folder / "output.txt").read_text()
        return SessionResult(status, output, read_test_records(self.folder / "record.jsonl"), seconds, leftovers)

    def _wait_for_leftovers(self) -> list[str]:
        """Return the processes and scratch directories that still exist ``LEFTOVER_TIMEOUT`` after the end."""
        until = time.monotonic() + LEFTOVER_TIMEOUT
        while (leftovers := [*self._iter_leftovers()]) and time.monotonic() < until:
            threading.Event().wait(0.05)
        return leftovers

    def _iter_leftovers(self) -> Iterator[str]:
        """Yield the session's living processes and existing scratch directories."""
        for pid, command_line in self.processes().items():
            yield f"process {pid}: {command_line}"
        yield from (f"directory {directory.name}" for directory in self.temporary.glob("zharness-*"))

    def processes(self) -> dict[int, str]:
        """Return the command lines of all living processes of this session by process id."""
        return self._program.find_descendants()


def read_test_records(path: Path) -> dict[str, RecordedTest]:
    """Return the recorded tests of a session from the recorder's file."""
    tests: dict[str, RecordedTest] = {}
    last = ""
    for line in path.read_text().splitlines() if path.exists() else ():
        data = json.loads(line)
        if data["kind"] == "left":
            if last:
                tests[last].leftover_pids = tuple(data["pids"])
            continue
        last = data["nodeid"].rpartition("::")[2]
        test = tests.setdefault(last, RecordedTest())
        if data["kind"] == "start":
            test.began = data["at"]
        test.ended = data["at"]
        if data["kind"] == "report":
            sections = tuple((title, text) for title, text in data["sections"])
            fields = (data["when"], data["outcome"], data["headline"], data["text"], sections, data["wasxfail"])
            test.reports.append(Report(*fields))
    return tests


def run(folder: Path, source: str | Mapping[str, str], *arguments: str) -> SessionResult:
    """Run a session over one file or several, and return its result."""
    files = {"test_it.py": source} if isinstance(source, str) else source
    return Session(folder, files, *arguments).finish()


def find_marked_lines(text: str, mark: str = "# site") -> Iterable[int]:
    """Return the numbers of the lines that end in ``mark``."""
    return [number for number, line in enumerate(text.splitlines(), 1) if line.endswith(mark)]
