"""Run test files of DeepSpeed twice, on DeepSpeed and on the reference engine in its place, and print a table.

    git clone https://github.com/deepspeedai/DeepSpeed
    python scripts/deepspeed_tests.py DeepSpeed/tests

Both runs use the drop-in for DistributedTest. ``deepspeed_tests.toml`` lists the files, and for each test that fails on
the reference engine the reason. The exit status is 1 if another test fails there, or if a listed one passes.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import tomllib

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_suffix(".toml")
COMMON = """from zharness.compat.deepspeed import *
from zharness.compat.deepspeed import DEEPSPEED_TEST_TIMEOUT
"""
# The files pass device_ids to DistributedDataParallel, which it refuses for a model on the CPU.
CONFTEST = """
_construct = torch.nn.parallel.DistributedDataParallel.__init__


def _construct_on_cpu(self, module, device_ids=None, output_device=None, **options):
    _construct(self, module, **options)


torch.nn.parallel.DistributedDataParallel.__init__ = _construct_on_cpu
"""
STAND_IN = "zharness.compat.deepspeed_engine.install"


@dataclass(frozen=True)
class Outcome:
    """The verdict of one test (passed, failed, skipped) and the first line of its message."""

    verdict: str
    message: str


@dataclass(frozen=True)
class Row:
    """One file in the table: the outcomes of its tests by name, on each engine, and the unexpected ones."""

    path: str
    on_deepspeed: dict[str, Outcome]
    on_reference: dict[str, Outcome]
    unexpected: list[str]

    def render(self) -> str:
        """Return the row of the Markdown table."""
        counts = [
            Counter(outcome.verdict for outcome in run.values()) for run in (self.on_deepspeed, self.on_reference)
        ]
        cells = [f"{c['passed']} ({c['failed']} failed, {c['skipped']} skipped)" if c else "not run" for c in counts]
        return f"| `{self.path}` | {len(self.on_reference)} | {' | '.join(cells)} |"


def prepare_tests(source: Path, target: Path) -> None:
    """Copy DeepSpeed's folder ``tests`` and put the drop-in in the place of ``unit/common.py``."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    (target / "unit/common.py").write_text(COMMON)
    with (target / "conftest.py").open("a") as file:
        file.write(CONFTEST)


def run_file(tests: Path, path: str, options: list[str], timeout: float) -> dict[str, Outcome]:
    """Run one test file with these options of pytest, and return the outcomes by ``Class::test[id]``."""
    report = tests / "report.xml"
    report.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        "--isolation",
        "pooled",
    ]
    search_path = os.pathsep.join([str(ROOT), str(tests)])
    subprocess.run(
        [*command, *options, f"--junitxml={report}", path],
        cwd=tests,
        env={**os.environ, "PYTHONPATH": search_path, "DS_ACCELERATOR": "cpu"},
        stdout=subprocess.DEVNULL,
        timeout=timeout,
        check=False,
    )
    return dict(read_outcomes(report)) if report.exists() else {}


def read_outcomes(report: Path) -> list[tuple[str, Outcome]]:
    """Return the name and outcome of every test in a JUnit file."""
    verdicts = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    outcomes = []
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314 - written by our own session
        problem = next((child for child in case if child.tag in verdicts), None)
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        message = "" if problem is None else (problem.get("message") or "").partition("\n")[0]
        outcomes.append((name, Outcome("passed" if problem is None else verdicts[problem.tag], message)))
    return outcomes


def find_unexpected(outcomes: dict[str, Outcome], exceptions: list[dict[str, Any]]) -> list[str]:
    """Describe the failures that no exception names, and the exceptions that name no failure."""
    failed = {name: outcome for name, outcome in outcomes.items() if outcome.verdict == "failed"}
    unexpected = [
        f"{name} failed: {outcome.message}"
        for name, outcome in failed.items()
        if not any(re.search(entry["tests"], name) for entry in exceptions)
    ]
    stale = [e["tests"] for e in exceptions if not any(re.search(e["tests"], name) for name in failed)]
    return [*unexpected, *(f"the exception {pattern!r} matches no failure" for pattern in stale)]


def main() -> int:
    """Run the files and print the table, the exceptions and what was unexpected; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tests", type=Path, help="the folder tests of a checkout of DeepSpeed")
    parser.add_argument("--files", default="", help="only the files whose path contains this text")
    parser.add_argument("--only-reference", action="store_true", help="do not run the files on DeepSpeed")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one file")
    options = parser.parse_args()
    listed = tomllib.loads(LIST.read_text())["file"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        tests = Path(folder)
        prepare_tests(options.tests, tests)
        for entry in listed:
            path, extra = entry["path"], entry.get("options", [])
            if options.files not in path:
                continue
            on_deepspeed = {} if options.only_reference else run_file(tests, path, extra, options.timeout)
            on_reference = run_file(tests, path, ["-p", STAND_IN, *extra], options.timeout)
            rows.append(
                Row(path, on_deepspeed, on_reference, find_unexpected(on_reference, entry.get("exception", [])))
            )
    print("| file | tests | passed on DeepSpeed | passed on the reference |\n|---|---|---|---|")
    for row in rows:
        print(row.render())
    for row in rows:
        for message in row.unexpected:
            print(f"UNEXPECTED {row.path}: {message}")
    return int(any(row.unexpected or not row.on_reference for row in rows))


if __name__ == "__main__":
    sys.exit(main())
