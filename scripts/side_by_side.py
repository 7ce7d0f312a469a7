"""Run test files of PyTorch or DeepSpeed with their own test classes and with the drop-ins, and compare each test."""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from xml.etree import ElementTree

from deepspeed_files.runs import reap_orphans
from tabulate import tabulate

from zharness.world.orphans import adopt_orphans

EPILOG = """
Each file runs twice, in two pytest processes: unchanged, and with its imports swapped. What runs are temporary copies.
The seconds are those of the whole process, and the CPU seconds those of it and its children. The ratio is that of the
CPU seconds, which other work on the machine changes less. The exit status is 1 if a test that both ways run ends
differently.

  python scripts/side_by_side.py pytorch --root pytorch/test/distributed tensor/test_init.py
  python scripts/side_by_side.py pytorch --cpu-devices 4 --root pytorch/test/distributed pipelining/test_stage.py
  python scripts/side_by_side.py deepspeed --root DeepSpeed/tests unit/comm/test_dist.py

With --cpu-devices, both ways count the CPU as so many devices, so that tests which need accelerators run.
"""
# Import swaps as pairs of a pattern and its replacement.
SWAPS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "pytorch": (
        (r"torch\.testing\._internal(\.| import )common_(distributed|fsdp)\b", r"zharness.compat.pytorch\1common_\2"),
        (
            r"torch\.testing\._internal\.distributed\._tensor\.common_dtensor\b",
            "zharness.compat.pytorch.common_dtensor",
        ),
    ),
    "deepspeed": ((r"\b(tests\.)?unit\.common\b", "zharness.compat.deepspeed"),),
}
COUNT_CPUS = "from zharness.compat.pytorch.cpu_devices import install_if_requested; install_if_requested()\n"
FIRST_IMPORT = re.compile(r"^(?=(?:import|from) (?!__future__))", re.MULTILINE)
WORLD_SIZE_ID = re.compile(r"(?<=\[)w\d+(?:-|(?=\]))|\[w\d+\]$")
VERDICT_ORDER = ("error", "failed", "skipped", "passed")


@dataclass(frozen=True)
class SideRun:
    """One way to run a file: wall and CPU seconds, exit status, and verdict and message of each test.

    The CPU seconds of a run that was killed are too low: they lack those of processes that nobody waited for.
    """

    seconds: float
    cpu_seconds: float
    status: int
    verdicts: dict[str, str]
    messages: dict[str, str]

    def describe(self) -> str:
        """Return the counts of verdicts, such as ``3 passed, 1 skipped``; the exit status if no test was reported."""
        counts = Counter(self.verdicts.values())
        parts = [f"{counts[verdict]} {verdict}" for verdict in reversed(VERDICT_ORDER) if counts[verdict]]
        return ", ".join(parts) or f"no result, status {self.status}"


@dataclass(frozen=True)
class FileRuns:
    """Both ways to run one file."""

    file: str
    own: SideRun
    swapped: SideRun

    def differences(self) -> list[str]:
        """Return a line for each test whose verdicts differ."""
        names = sorted({*self.own.verdicts, *self.swapped.verdicts})
        pairs = [(name, self.own.verdicts.get(name, "-"), self.swapped.verdicts.get(name, "-")) for name in names]
        return [
            f"{self.file}::{name}: {own} -> {swapped}: {self.swapped.messages.get(name) or self.own.messages.get(name)}"
            for name, own, swapped in pairs
            if own != swapped
        ]

    def row(self) -> list[object]:
        """Return the table's row of this file."""
        equal = sum(self.swapped.verdicts.get(name) == verdict for name, verdict in self.own.verdicts.items())
        same = f"{equal} of {len({*self.own.verdicts, *self.swapped.verdicts})}"
        own, swapped = self.own, self.swapped
        ratio = own.cpu_seconds / swapped.cpu_seconds
        times = [own.seconds, swapped.seconds, own.cpu_seconds, swapped.cpu_seconds, ratio]
        return [self.file, own.describe(), swapped.describe(), same, *times]


def main() -> int:
    """Run the files that the command line names and print the table."""
    options = parse_arguments()
    adopt_orphans()
    results = []
    for file in options.files:
        own = run_file(options, file, is_swapped=False)
        result = FileRuns(file, own, run_file(options, file, is_swapped=True))
        results.append(result)
        print("\n".join(result.differences()) or f"{file}: no differences", file=sys.stderr, flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(entry) for entry in results], indent=1))
    print_table(results)
    return int(any(has_different_run(result) for result in results))


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("project", choices=sorted(SWAPS))
    parser.add_argument("files", nargs="+", help="test files, relative to the root")
    parser.add_argument("--root", type=Path, required=True, help="folder of the project's tests")
    parser.add_argument("--cpu-devices", type=int, default=0, help="count the CPU as so many devices")
    parser.add_argument("--select", default="", help="run only the tests that this expression of pytest's -k selects")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one file (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write all results into this file")
    return parser.parse_args()


def run_file(options: argparse.Namespace, file: str, *, is_swapped: bool) -> SideRun:
    """Run one file in a pytest process of its own, in a copy of the project's tests."""
    with tempfile.TemporaryDirectory(prefix="side-") as folder:
        root = copy_tests(options, file, Path(folder) / "tests", is_swapped=is_swapped)
        xml = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={xml}"]
        command += [f"--basetemp={folder}/temp", "--rank-timeout", "120", file]
        command += ["-k", options.select] if options.select else []
        environment = {**os.environ, "ZHARNESS_CPU_DEVICES": str(options.cpu_devices or "")}
        environment["PYTHONPATH"] = os.pathsep.join(
            [str((root / file).parent), str(root), os.environ.get("PYTHONPATH", "")]
        )
        environment.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "120")
        environment.setdefault("DS_UNITTEST_TIMEOUT", "120")
        log = Path(folder) / "log"
        with log.open("w") as output:
            start, cpu_before = monotonic(), children_cpu_seconds()
            status = run_limited(command, root, environment, output.fileno(), options.limit)
            seconds = monotonic() - start
            reap_orphans()  # such as multiprocessing's fork server, whose ranks are part of the run
            cpu_seconds = children_cpu_seconds() - cpu_before
        verdicts, messages = read_junit_xml(xml)
        if not verdicts:
            print(log.read_text()[-3000:], file=sys.stderr)
        return SideRun(seconds, cpu_seconds, status, verdicts, messages)


def children_cpu_seconds() -> float:
    """Return the CPU seconds of all child processes that have ended and that this process has waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_limited(command: list[str], root: Path, environment: dict[str, str], output: int, limit: float) -> int:
    """Run a command in a process group of its own and return its status; kill the group after ``limit`` seconds."""
    with subprocess.Popen(
        command, cwd=root, env=environment, stdout=output, stderr=output, start_new_session=True
    ) as process:
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return -9


def copy_tests(options: argparse.Namespace, file: str, target: Path, *, is_swapped: bool) -> Path:
    """Copy the project's tests to ``target`` and change the file as requested; return ``target``.

    For DeepSpeed all tests are copied, because they import each other; for PyTorch only the folder of the file.
    """
    if options.project == "deepspeed":
        shutil.copytree(options.root, target)
    else:
        shutil.copytree((options.root / file).parent, (target / file).parent)
    text = (target / file).read_text()
    if options.cpu_devices:
        text = FIRST_IMPORT.sub(COUNT_CPUS, text, count=1)
    if is_swapped:
        unchanged = text
        for pattern, replacement in SWAPS[options.project]:
            text = re.sub(pattern, replacement, text)
        if text == unchanged:
            sys.exit(f"{file}: no import of a class that has a drop-in, so both ways would be the same")
    (target / file).write_text(text)
    return target


def read_junit_xml(xml: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the verdict and the message of every test in a JUnit file; nothing if the file does not exist.

    Parts of ids that name the world size are removed; of the verdicts of equal ids, the worst counts.
    """
    verdicts: dict[str, str] = {}
    messages: dict[str, str] = {}
    for element in ElementTree.parse(xml).iter("testcase") if xml.exists() else ():  # noqa: S314 - pytest wrote it
        name = ".".join([*element.get("classname", "").split(".")[-1:], element.get("name", "")])
        name = WORLD_SIZE_ID.sub("", name)
        problems = [child for child in element if child.tag in ("failure", "error", "skipped")]
        verdict = {"failure": "failed"}.get(problems[0].tag, problems[0].tag) if problems else "passed"
        if VERDICT_ORDER.index(verdict) <= VERDICT_ORDER.index(verdicts.get(name, "passed")):
            verdicts[name] = verdict
            messages[name] = " ".join((problems[0].get("message") or "").split())[:160] if problems else ""
    return verdicts, messages


def has_different_run(result: FileRuns) -> bool:
    """Return whether a test that both ways ran, to pass or to fail, ended differently."""
    own, swapped = result.own.verdicts, result.swapped.verdicts
    return any(
        own[name] != swapped[name] and "skipped" not in (own[name], swapped[name]) for name in {*own} & {*swapped}
    )


def print_table(results: Iterable[FileRuns]) -> None:
    """Print a Markdown table with a row for each file."""
    times = ["own s", "drop-in s", "own CPU s", "drop-in CPU s", "ratio"]
    headers = ["file", "own classes", "drop-in", "same", *times]
    rows = [result.row() for result in results]
    print(tabulate(rows, headers=headers, tablefmt="github", floatfmt=("", "", "", "", *(".1f" for _ in times))))


if __name__ == "__main__":
    sys.exit(main())
