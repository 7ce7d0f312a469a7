"""Revert fixes of an engine one by one, and see whether the tier for pull requests notices.

    python scripts/reverted_fixes.py --source deepspeed-0.19.8 --reach reach.jsonl fixes/*.diff

``--source`` is a git repository of the engine, whose HEAD has all the fixes, and ``--reach`` a record of it by
``zharness check --record-reach``. For each diff, a copy of HEAD without the fix is checked as a pull request is:
``zharness check --changed HEAD -x``. The cells that fail run once more on HEAD, and one that fails there too does
not count. Prints a table of what was noticed, after how many cells and seconds, and exits with 1 unless every fix was
noticed. On a busy machine, make ``--max-seconds`` longer and judge by the seconds of the processors.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HOLDS = ("pass", "contract", "unsupported")
NOT_IMPORTED = "cannot be imported"  # in the message with which the tier ends if the engine has no valid source
CONTROL = ("training.grads", "--model", "mlp")  # cells that show whether an engine can be imported


class Notice(Enum):
    """Whether the tier noticed a reverted fix."""

    NOTICED = "noticed"
    MISSED = "missed"
    NOT_COUNTED = "not counted: does not hold with the fix"


@dataclass(frozen=True)
class Outcome:
    """What the tier said of one reverted fix: the cells that ran, the first failure or last line, and the cost.

    ``seconds`` are those of the clock, and ``cpu_seconds`` those of the processors, planning and starting included.
    """

    name: str
    notice: Notice
    cells: int
    seconds: float
    cpu_seconds: float
    first_failure: str

    def describe(self) -> str:
        """Return a row of the table."""
        cells = (self.name, self.notice.value, self.cells, f"{self.seconds:.0f}", f"{self.cpu_seconds:.0f}")
        return f"| {' | '.join(map(str, cells))} | {self.first_failure} |"


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
    """Return the processor seconds of the processes that this one has started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def list_failures(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the ids of the cells whose law does not hold; an expected failure is none."""
    return [record["case"] for record in records if record["verdict"] not in HOLDS and not record.get("excuse")]


def list_holding(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the ids of the cells that ran and are no failures."""
    failures = list_failures(records)
    return [record["case"] for record in records if record["case"] not in failures]


def judge_failures(failures: Sequence[str], holding: Sequence[str]) -> tuple[Notice, str]:
    """Judge the ``failures`` without a fix by the cells that are ``holding`` with it, and name the failure that counts.

    A failure of a cell that fails with the fix too, or that did not run with it, does not count.
    """
    counted = [failure for failure in failures if failure in holding]
    if counted:
        return Notice.NOTICED, counted[0]
    return (Notice.NOT_COUNTED, failures[0]) if failures else (Notice.MISSED, "")


def check_without_fix(source: Path, fix: Path, engine: str, reach: Path, seconds: float) -> Outcome:
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
        options = ("--changed", "HEAD", "--reach", str(reach), "-x", "--max-seconds", str(seconds))
        start, cpu_start = time.monotonic(), read_cpu_seconds()
        reverted = run_check(Path(folder, "reverted.jsonl"), "--engine", f"{engine}@{copy}", *options)
        duration, cpu_seconds = time.monotonic() - start, read_cpu_seconds() - cpu_start
        last_line = reverted.last_line.replace(str(copy), fix.stem)
        failures = [case.replace(f"@{copy}", f"@{control}") for case in list_failures(reverted.records)]
        if failures:
            run = run_check(Path(folder, "control.jsonl"), *failures)
            notice, failure = judge_failures(failures, list_holding(run.records))
        elif NOT_IMPORTED in last_line:
            run = run_check(Path(folder, "control.jsonl"), "--engine", f"{engine}@{control}", *CONTROL)
            notice, failure = (Notice.NOTICED if run.records else Notice.NOT_COUNTED), last_line
        else:
            notice, failure = Notice.MISSED, last_line
        failure = failure.replace(f"@{control}", "")
        return Outcome(fix.stem, notice, len(reverted.records), duration, cpu_seconds, failure)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fixes", nargs="+", type=Path, help="diffs against the commit before each fix")
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--reach", type=Path, required=True)
    parser.add_argument("--engine", default="deepspeed")
    parser.add_argument("--max-seconds", type=float, default=120)
    arguments = parser.parse_args()
    print("| fix | tier | cells | seconds | CPU seconds | first failure |\n|---|---|---|---|---|---|")
    outcomes = []
    for fix in arguments.fixes:
        outcomes.append(
            check_without_fix(arguments.source, fix, arguments.engine, arguments.reach, arguments.max_seconds)
        )
        print(outcomes[-1].describe(), flush=True)
    noticed = sum(outcome.notice is Notice.NOTICED for outcome in outcomes)
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"\n{noticed} of {len(outcomes)} noticed; load of the machine over 1, 5 and 15 minutes: {load}")
    return 0 if noticed == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
