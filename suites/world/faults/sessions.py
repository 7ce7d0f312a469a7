"""Sessions of pytest inside the tests: each a process of its own, recorded, and searched for what it leaves."""

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

# The recorder: what pytest logs and when, for the process that runs the session alone (ranks are forks of it). Where a
# test noted process ids, it waits at the next test until they are gone, and records those that are not.
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
class Told:
    """All that was logged of one test; ``left`` are the processes it noted that outlived it by ``GONE`` seconds."""

    reports: list[Report] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0
    left: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """From the start of the test to the last word on it."""
        return self.ended - self.began

    def outcome(self, when: str) -> str | None:
        """That of one phase; None without a report, all of them where there are several."""
        return ", ".join(report.outcome for report in self.reports if report.when == when) or None


@dataclass(frozen=True)
class Done:
    """A session that has ended; ``tests`` by the last part of their ids."""

    status: int
    output: str
    tests: Mapping[str, Told]
    seconds: float
    leftovers: tuple[str, ...]

    def verdicts(self) -> dict[str, str]:
        """``call passed`` or the like for every test: the first phase that did not pass."""
        return {
            name: next((f"{r.when} {r.outcome}" for r in told.reports if r.outcome != "passed"), "passed")
            for name, told in self.tests.items()
        }


def pytest(
    folder: Path, arguments: Sequence[str], variables: Mapping[str, str], typed: str = "", spares: int = 0
) -> Program:
    """Begin a session of pytest in ``folder``, which has what it prints in ``output.txt``.

    Of the environment it has what is not that of this pytest, and ``variables``.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "ZHARNESS"))}
    with (folder / "output.txt").open("wb") as output:
        words = ("-m", "pytest", *arguments)
        return Program(words, output, output, folder, {**environment, **variables}, stdin_text=typed, spares=spares)


class Session:
    """A pytest of its own over files in ``folder``, with a private place for temporary files.

    ``spares`` are workers of xdist that do not have to import anything.
    """

    def __init__(self, folder: Path, files: Mapping[str, str], *arguments: str, spares: int = 0) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True, exist_ok=True)
        (folder / "notes").mkdir(exist_ok=True)
        (folder / "record.jsonl").unlink(missing_ok=True)  # of a session before this one
        (folder / "pytest.ini").write_text(inner.settings(*files.values()))
        (folder / "conftest.py").write_text(RECORDER.replace("GONE", str(LEFTOVER_TIMEOUT)))
        for name, text in files.items():
            (folder / name).write_text(textwrap.dedent(text))
        command = [f"--basetemp={folder / 'base'}", *arguments]
        self._began = time.monotonic()
        self._program = pytest(folder, command, {"TMPDIR": str(self.temporary), "COLUMNS": "200"}, spares=spares)
        self.pid = self._program.pid

    def signal(self, what: signal.Signals) -> None:
        """Send it to pytest, and to nothing else."""
        self._program.send_signal(what)

    def done(self) -> Done:
        """Wait for the end, and for everything that it started to be gone."""
        with self._program as program:
            status = program.wait()
            seconds = time.monotonic() - self._began
            left = tuple(self._left())
        output = (self.folder / "output.txt").read_text()
        return Done(status, output, told_in(self.folder / "record.jsonl"), seconds, left)

    def _left(self) -> list[str]:
        """What is still there ``GONE`` seconds after the end: processes, and the servers' directories."""
        until = time.monotonic() + LEFTOVER_TIMEOUT
        while (found := [*self._there()]) and time.monotonic() < until:
            threading.Event().wait(0.05)
        return found

    def _there(self) -> Iterator[str]:
        for pid, words in self.processes().items():
            yield f"process {pid}: {words}"
        yield from (f"directory {room.name}" for room in self.temporary.glob("zharness-*"))

    def processes(self) -> dict[int, str]:
        """The command lines of all living processes of this session."""
        return self._program.find_descendants()


def told_in(path: Path) -> dict[str, Told]:
    """The tests of a session, from the recorder's file."""
    tests: dict[str, Told] = {}
    last = ""
    for line in path.read_text().splitlines() if path.exists() else ():
        data = json.loads(line)
        if data["kind"] == "left":
            if last:
                tests[last].left = tuple(data["pids"])
            continue
        last = data["nodeid"].rpartition("::")[2]
        told = tests.setdefault(last, Told())
        if data["kind"] == "start":
            told.began = data["at"]
        told.ended = data["at"]
        if data["kind"] == "report":
            sections = tuple((title, text) for title, text in data["sections"])
            words = (data["when"], data["outcome"], data["headline"], data["text"], sections, data["wasxfail"])
            told.reports.append(Report(*words))
    return tests


def run(folder: Path, source: str | Mapping[str, str], *arguments: str) -> Done:
    """A session over one file, or several, from its start to its end."""
    files = {"test_it.py": source} if isinstance(source, str) else source
    return Session(folder, files, *arguments).done()


def lines_marked(text: str, mark: str = "# site") -> Iterable[int]:
    """The numbers of the lines that end in ``mark``."""
    return [number for number, line in enumerate(text.splitlines(), 1) if line.endswith(mark)]
