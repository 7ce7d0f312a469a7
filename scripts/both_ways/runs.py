"""Run one test file in one way, within a time limit, read the outcomes, and keep runs in a file."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from statistics import median
from time import monotonic

from zharness.world.orphans import kill_orphans

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ("-q", "-p", "both_ways.recording", "-p", "no:cacheprovider", "-o", "addopts=")
DEVICE_IDS = re.compile(r",\s*device_ids=[^,)]*(,\s*output_device=[^,)]*)?")
COUNT_PROCESS = "\nimport both_ways.count_process\n"
WORST_FIRST = ("failed", "skipped", "passed")
TEST_TIMEOUT = "300"  # seconds of one test, in all ways
KILLED = -9
FOLDER_PREFIX = "both-ways-"  # of the temporary folder with the copies of the files
COLLECTION = "(collection)"  # the name of the outcome of a file that could not be collected


class Way(str, Enum):
    """Which classes start the ranks of the tests, and which engine is ``deepspeed``."""

    OWN = "own"
    DROP_IN = "drop-in"
    STAND_IN = "stand-in"
    # The classes of the file's own project, for failures, skips and a sample of passes with the drop-in.
    RECHECK = "recheck"


OWN_CLASSES = (Way.OWN, Way.RECHECK)


@dataclass(frozen=True)
class Selection:
    """Which tests of a file run: the names ``only``, or ``size`` tests, or all if neither is given.

    The tests are drawn by ``seed``, or spread evenly over the sorted names without one.
    """

    size: int = 0
    seed: int | None = None
    only: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the selection as the plugin of the run reads it."""
        return json.dumps(vars(self))


@dataclass(frozen=True)
class FileRun:
    """What one pytest process did with one file: verdict and message of each test by name, and the seconds.

    ``sample`` is the number of tests to which the run was limited, or 0, ``seed`` what drew them, and ``limit`` its
    time limit in seconds. ``status`` is -9 for a run that was killed at that limit; its tests that had not ended are
    missing. A file that could not be collected has the one outcome ``COLLECTION``. ``processes`` is the number of
    processes that the project's own classes started for ranks, and 0 in the other ways, whose ranks are forked from one
    server; None is unknown. ``on_ranks`` has the tests of the file whose class starts ranks, of the sample or not, and
    is None where that was not recorded.
    """

    path: str
    way: Way
    sample: int
    seconds: float
    cpu_seconds: float
    status: int
    outcomes: dict[str, tuple[str, str]]
    limit: float = 0.0
    processes: int | None = None
    seed: int | None = None
    on_ranks: list[str] | None = None

    def to_json(self) -> str:
        """Return the run as one line."""
        return json.dumps(vars(self))

    @staticmethod
    def from_json(line: str) -> FileRun:
        """Read a run from its line."""
        record = json.loads(line)
        outcomes = {name: (verdict, message) for name, (verdict, message) in record.pop("outcomes").items()}
        return FileRun(**{**record, "way": Way(record["way"])}, outcomes=outcomes)

    def describe(self) -> str:
        """Return the counts of verdicts, such as ``3 passed, 1 skipped``, and whether the run was killed."""
        if COLLECTION in self.outcomes:
            return {"failed": "not collected", "skipped": "skips itself"}[self.outcomes[COLLECTION][0]]
        counts = {verdict: len(self.named(verdict)) for verdict in reversed(WORST_FIRST)}
        parts = [f"{count} {verdict}" for verdict, count in counts.items() if count]
        return ", ".join(parts or ["no tests"]) + (", killed" if self.status == KILLED else "")

    def answers(self, selection: Selection, limit: float) -> bool:
        """Return whether a run of ``selection`` within ``limit`` seconds would tell nothing more than this one."""
        if selection.only:
            return self.outcomes.keys() >= set(selection.only)
        same = (self.sample, self.seed) == (selection.size, selection.seed)
        return same and (self.status != KILLED or self.limit >= limit)

    def named(self, verdict: str) -> list[str]:
        """Return the names of the tests with this verdict."""
        return [name for name, outcome in self.outcomes.items() if outcome[0] == verdict]


def combine_runs(runs: Sequence[FileRun]) -> FileRun:
    """Return the last of several runs of one file in one way, with the medians of the seconds of all."""
    seconds, cpu = (median(values) for values in zip(*((run.seconds, run.cpu_seconds) for run in runs), strict=True))
    return replace(runs[-1], seconds=seconds, cpu_seconds=cpu)


def run_in_copy(
    path: str,
    way: Way,
    selection: Selection,
    limit: float,
    copy: Callable[[Path], None],
    options: Sequence[str],
    variables: Mapping[str, str],
    folders: Sequence[Path],
) -> FileRun:
    """Run one file in a pytest process of its own, in a folder to which ``copy`` writes the tests.

    The process imports from ``folders``, relative to that folder, and from this repository.
    """
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as folder:
        tests = Path(folder) / "tests"
        copy(tests)
        command = [sys.executable, "-m", "pytest", *OPTIONS, *options, f"--basetemp={folder}/temp", path]
        imported = os.pathsep.join(map(str, (*(tests / name for name in folders), ROOT, ROOT / "scripts")))
        environment = {**os.environ, **variables, "PYTHONPATH": imported}
        return measure_run(path, way, selection, limit, command, tests, environment)


def measure_run(
    path: str,
    way: Way,
    selection: Selection,
    limit: float,
    command: list[str],
    tests: Path,
    environment: Mapping[str, str],
) -> FileRun:
    """Run pytest's ``command`` on one file in the folder ``tests``, and kill it after ``limit`` seconds.

    The files that the run writes lie beside ``tests``. The CPU seconds are those of all processes of the run. Other
    installed plugins are not loaded: Hypothesis alone takes 0.3 CPU seconds of every run.
    """
    folder = tests.parent
    outcomes, imports, on_ranks = folder / "outcomes.jsonl", folder / "imports", folder / "on_ranks.json"
    variables = {
        **environment,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "BOTH_WAYS_SELECTION": selection.to_json(),
        "BOTH_WAYS_OUTCOMES": str(outcomes),
        "BOTH_WAYS_IMPORTS": str(imports),
        "BOTH_WAYS_ON_RANKS": str(on_ranks),
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = monotonic()
    with (folder / "log").open("w") as log:
        status = run_limited(command, tests, variables, log.fileno(), limit)
    seconds = monotonic() - start
    reap_orphans()  # such as multiprocessing's resource tracker
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if not outcomes.exists():
        print((folder / "log").read_text()[-1500:], file=sys.stderr)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found, processes = read_outcomes(outcomes), count_rank_processes(imports)
    size, seed = selection.size, selection.seed
    names = json.loads(on_ranks.read_text()) if on_ranks.exists() else None
    return FileRun(path, way, size, round(seconds, 1), round(cpu, 1), status, found, limit, processes, seed, names)


def count_rank_processes(imports: Path) -> int:
    """Return how many processes besides pytest's own wrote a line, by importing own classes or PyTorch's test file."""
    return max(len(imports.read_text().splitlines()) - 1, 0) if imports.exists() else 0


def run_limited(command: list[str], folder: Path, environment: dict[str, str], output: int, limit: float) -> int:
    """Run a command in a process group of its own and return its status.

    Kill the group after ``limit`` seconds, and at Ctrl-C, which the terminal does not send to that group.
    """
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
    ) as process:
        try:
            return process.wait(limit)
        except BaseException as error:
            os.killpg(process.pid, -KILLED)
            if isinstance(error, subprocess.TimeoutExpired):
                return KILLED
            raise


def reap_orphans() -> None:
    """Kill the processes that a run left, and wait for all, so that their CPU seconds count."""
    kill_orphans(())
    with suppress(ChildProcessError):
        while True:
            os.wait()


def read_outcomes(file: Path) -> dict[str, tuple[str, str]]:
    """Return the outcomes by name; of the phases and world sizes of one test, the worst counts."""
    outcomes: dict[str, tuple[str, str]] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        name, verdict, message = json.loads(line)
        known = outcomes.get(name, ("passed", ""))[0]
        if name not in outcomes or WORST_FIRST.index(verdict) < WORST_FIRST.index(known):
            outcomes[name] = (verdict, " ".join(message.split())[:300])
    return outcomes
