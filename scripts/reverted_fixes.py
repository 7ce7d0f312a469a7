"""Revert fixes of an engine one by one, and report whether the check for pull requests (the tier) notices.

    python scripts/reverted_fixes.py --source deepspeed-0.19.8 --reach reach.jsonl fixes/*.diff

``--source`` is a git repository of the engine, whose HEAD has all the fixes, and ``--reach`` is a record of HEAD by
``zharness check --record-reach``. For each diff, the script checks a copy of HEAD without the fix like a pull request:
``zharness check --changed HEAD -x``. A cell that fails runs once more on HEAD. If it also fails on HEAD, it does not
count, and the check continues with the cells that have not run, until the time is over. The script prints a table with
the fixes that were noticed, after how many cells and seconds, and exits with 1 unless every fix was noticed. On a busy
machine, increase ``--max-seconds`` and judge by processor seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HOLDS = ("pass", "contract", "unsupported")
NOT_IMPORTED = "cannot be imported"  # part of the last message of the tier if the engine has no valid source
LEAST_SECONDS = 1.0  # the tier starts no further run if less time is left
CONTROL = ("training.grads", "--model", "mlp")  # cells that show whether an engine can be imported


class Notice(Enum):
    """Whether the tier noticed a reverted fix."""

    NOTICED = "noticed"
    MISSED = "missed"
    NOT_COUNTED = "not counted: cannot be imported with the fix either"


@dataclass(frozen=True)
class Outcome:
    """The result of the tier for one reverted fix: the cells that ran, the first failure or last line, and the cost.

    ``seconds`` are wall-clock seconds and ``cpu_seconds`` processor seconds, including planning and starting, but not
    the runs with the fix. ``failures_with_fix`` are the cells that also fail with the fix.
    """

    name: str
    notice: Notice
    cells: int
    seconds: float
    cpu_seconds: float
    first_failure: str
    failures_with_fix: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return a row of the table."""
        cells = (self.name, self.notice.value, self.cells, f"{self.seconds:.0f}", f"{self.cpu_seconds:.0f}")
        with_fix = f"; with the fix too: {', '.join(self.failures_with_fix)}" if self.failures_with_fix else ""
        return f"| {' | '.join(map(str, cells))} | {self.first_failure}{with_fix} |"


@dataclass(frozen=True)
class CheckRun:
    """The records of a run of ``zharness check`` as JSON objects, and the last line of its standard error."""

    records: list[dict[str, Any]]
    last_line: str


def run_check(records: Path, *arguments: str) -> CheckRun:
    """Run ``zharness check`` and read its ``records``. Raises CalledProcessError if a signal ended it."""
    command = ("zharness", "check", *arguments, "--isolation", "pooled", "--jsonl", str(records))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode < 0:
        raise subprocess.CalledProcessError(done.returncode, command)
    lines = records.read_text("utf-8").splitlines() if records.exists() else []
    return CheckRun([json.loads(line) for line in lines], (done.stderr.strip().splitlines() or [""])[-1])


def read_cpu_seconds() -> float:
    """Return the processor seconds of all ended child processes of this process."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def list_failures(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the ids of the cells that make a check red; an expected failure does not.

    These are broken laws, leaks (cells that fail on ranks that other cells have used), and stale expected failures.
    """
    return [record["case"] for record in records if is_red(record)]


def is_red(record: Mapping[str, Any]) -> bool:
    """Return whether a cell makes a check red, so that ``-x`` stops the check."""
    if record.get("excuse"):
        return False
    return record["verdict"] not in HOLDS or bool(record.get("pool_difference") or record.get("stale"))


def list_holding(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the ids of the cells that ran and are not failures."""
    failures = list_failures(records)
    return [record["case"] for record in records if record["case"] not in failures]


@dataclass(frozen=True)
class TierRun:
    """The result of the runs of a tier: their records, the first failure that counts, and the failures of the base.

    ``first_failure`` is empty if no failure counts. ``seconds`` and ``cpu_seconds`` are the time of the tier's runs.
    """

    records: list[dict[str, Any]]
    last_line: str
    first_failure: str
    failures_of_base: tuple[str, ...]
    seconds: float
    cpu_seconds: float


def run_tier(
    run_rest: Callable[[float, Sequence[Path]], tuple[CheckRun, Path]],
    list_failures_of_base: Callable[[Sequence[str]], Sequence[str]],
    max_seconds: float,
    jobs: int,
) -> TierRun:
    """Run a tier, which stops at each failure, until a cell fails that holds on the base, or its time is over.

    The time is over when the cells have taken ``max_seconds``. ``run_rest(seconds, files)`` runs the cells that the
    records ``files`` lack until one fails, for at most ``seconds``, and returns the run and the file of its records.
    ``list_failures_of_base(cells)`` returns the cells that do not hold on the base. ``jobs`` cells run at a time.
    """
    records, files, failures_of_base = list[dict[str, Any]](), list[Path](), list[str]()
    seconds, cpu_seconds, left = 0.0, 0.0, max_seconds
    while True:
        start, cpu_start = time.monotonic(), read_cpu_seconds()
        run, file = run_rest(left, files)
        seconds += time.monotonic() - start
        cpu_seconds += read_cpu_seconds() - cpu_start
        records += run.records
        files.append(file)
        # Count only the time of cells: a continued run plans and starts again, which does not happen in a pull request.
        left = max_seconds - sum(record["seconds"] for record in records) / jobs
        failures = list_failures(run.records)
        of_base = list_failures_of_base(failures) if failures else ()
        failures_of_base += of_base
        counted = [failure for failure in failures if failure not in of_base]
        if counted or not failures or left < LEAST_SECONDS:
            first_failure = counted[0] if counted else ""
            return TierRun(records, run.last_line, first_failure, tuple(failures_of_base), seconds, cpu_seconds)


def check_without_fix(source: Path, fix: Path, engine: str, reach: Path, max_seconds: float, jobs: int) -> Outcome:
    """Check a copy of ``source`` without the change of the file ``fix``, as a pull request of the engine is checked.

    The cells that fail run once more on a copy that has the fix.
    """
    with TemporaryDirectory() as folder:
        control, copy = Path(folder, "control"), Path(folder, "reverted")
        for arguments in (
            ("clone", "-q", str(source), str(control)),
            ("clone", "-q", str(source), str(copy)),
            ("-C", str(copy), "apply", "-R", str(fix.resolve())),
        ):
            subprocess.run(["git", *arguments], check=True)  # noqa: S607 - the git of the caller
        options = ("--changed", "HEAD", "--reach", str(reach), "-x", "--jobs", str(jobs))

        def run_rest(seconds: float, files: Sequence[Path]) -> tuple[CheckRun, Path]:
            """Run the cells that ``files`` lack on the copy without the fix."""
            file = Path(folder, f"reverted{len(files)}.jsonl")
            earlier = [argument for each in files for argument in ("--continue", str(each))]
            where = ("--engine", f"{engine}@{copy}", "--max-seconds", str(seconds))
            return run_check(file, *where, *options, *earlier), file

        def list_failures_of_base(failures: Sequence[str]) -> list[str]:
            """Return the ``failures`` that do not hold, or do not run, on the copy with the fix."""
            cells = {failure: failure.replace(f"@{copy}", f"@{control}") for failure in failures}
            holding = list_holding(run_check(Path(folder, "control.jsonl"), *cells.values()).records)
            return [failure for failure, cell in cells.items() if cell not in holding]

        tier = run_tier(run_rest, list_failures_of_base, max_seconds, jobs)
        last_line = tier.last_line.replace(str(copy), fix.stem)
        if tier.first_failure:
            notice, failure = Notice.NOTICED, tier.first_failure
        elif NOT_IMPORTED in last_line:
            run = run_check(Path(folder, "control.jsonl"), "--engine", f"{engine}@{control}", *CONTROL)
            notice, failure = (Notice.NOTICED if run.records else Notice.NOT_COUNTED), last_line
        else:
            notice, failure = Notice.MISSED, last_line
        failure, *with_fix = (each.replace(f"@{copy}", "") for each in (failure, *tier.failures_of_base))
        costs = (len(tier.records), tier.seconds, tier.cpu_seconds)
        return Outcome(fix.stem, notice, *costs, failure, tuple(with_fix))


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fixes", nargs="+", type=Path, help="diffs against the commit before each fix")
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--reach", type=Path, required=True)
    parser.add_argument("--engine", default="deepspeed")
    parser.add_argument("--max-seconds", type=float, default=120)
    parser.add_argument("--jobs", type=int, default=2, help="number of cells to run at once")
    arguments = parser.parse_args()
    print("| fix | tier | cells | seconds | CPU seconds | first failure |\n|---|---|---|---|---|---|")
    outcomes = []
    for fix in arguments.fixes:
        where = (arguments.source, fix, arguments.engine, arguments.reach)
        outcomes.append(check_without_fix(*where, arguments.max_seconds, arguments.jobs))
        print(outcomes[-1].describe(), flush=True)
    noticed = sum(outcome.notice is Notice.NOTICED for outcome in outcomes)
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"\n{noticed} of {len(outcomes)} noticed; load of the machine over 1, 5 and 15 minutes: {load}")
    return 0 if noticed == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
