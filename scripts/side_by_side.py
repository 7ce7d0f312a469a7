"""Run test files of PyTorch with its own test classes and with the drop-ins, compare test by test, and print tables."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import tomllib
from deepspeed_files.runs import (
    COUNT_PROCESS,
    DEVICE_IDS,
    FOLDER_PREFIX,
    ROOT,
    FileRun,
    Selection,
    Way,
    measure_run,
)
from deepspeed_files.tables import compare_ways, find_unexpected, render_drop_in
from tabulate import tabulate

from zharness.world.orphans import adopt_orphans

EPILOG = """
Files and folders are relative to --root; a folder stands for its test_*.py, smallest first. Each file runs twice, in
two pytest processes: as it is, and with its imports swapped. What runs are temporary copies. The file of --jsonl keeps
the runs, and what it has is not run again, unless --sample or --seed differs or --limit is above the one at which a run
was killed. Both ways run the same --sample tests of a file, spread over those that run on ranks or drawn by --seed. The
CPU seconds are those of all processes of a run, and the ratio is theirs, which other work on the machine changes less.
--cpu-devices counts the CPU as so many devices, so that tests which need accelerators run; --on-cpu replaces CUDA and
NCCL by the CPU and gloo in the copies. Both act both ways. side_by_side.toml lists the exceptions. The exit status is 1
if another test ends differently, if another file gains less than 2 x, or if a run was killed or has no test.

  python scripts/side_by_side.py --root pytorch/test/distributed --jsonl runs.jsonl tensor/test_init.py
  python scripts/side_by_side.py --root pytorch/test/distributed --jsonl runs.jsonl --cpu-devices 4 pipelining
"""
# Import swaps as pairs of a pattern and its replacement.
SWAPS = (
    (r"torch\.testing\._internal(\.| import )common_(distributed|fsdp)\b", r"zharness.compat.pytorch\1common_\2"),
    (r"torch\.testing\._internal\.distributed\._tensor\.common_dtensor\b", "zharness.compat.pytorch.common_dtensor"),
)
# What --on-cpu replaces, also names that a later release of torch spells otherwise.
CPU_NAMES = (
    (r"cpu:gloo,cuda:nccl", "cpu:gloo"),
    (r"\brequires_nccl\b", "requires_gloo"),
    (r"\bis_nccl_available\b", "is_gloo_available"),
    (r"([\"'])nccl\1", r"\1gloo\1"),
    (r"([\"'])cuda\1", r"\1cpu\1"),
    (r"f\"cuda:\{[^}]*\}\"|\"cuda:\d+\"", '"cpu"'),
    (r"\.cuda\(\)", ".cpu()"),
    (r"\btorch\.cuda\.manual_seed\b", "torch.manual_seed"),
    (r"\btorch\.cuda\.", "torch.cpu."),
    (r"\bnot (TEST_CUDA|TEST_MULTIGPU)\b", "False"),
    (r"\bMultiProcContinousTest\b", "MultiProcContinuousTest"),
)
COUNT_CPUS = "from zharness.compat.pytorch.cpu_devices import install_if_requested; install_if_requested()\n"
RANK_CLASS = re.compile(
    r"\b(MultiProcessTestCase|MultiProcContinuousTest|DistributedTestBase|FSDPTest(Continuous)?"
    r"|DTensor(Continuous)?TestBase)\b"
)
FIRST_IMPORT = re.compile(r"^(?=(?:import|from) (?!__future__))", re.MULTILINE)
OPTIONS = ("-q", "-p", "deepspeed_files.recording", "-p", "no:cacheprovider", "-o", "addopts=")
EXCEPTIONS = Path(__file__).with_suffix(".toml")


def main() -> int:
    """Run what the file of results lacks, print the tables, and return the exit status."""
    options = parse_arguments()
    adopt_orphans()
    known = read_runs(options.jsonl)
    rest: dict[str, str] = {}
    for path in find_files(options.root, options.files):
        if not RANK_CLASS.search(port_to_cpu((options.root / path).read_text(encoding="utf-8"))):
            rest[path] = "uses no class that starts ranks: nothing to swap"
            continue
        for way in (Way.DROP_IN, Way.OWN):
            run = known.get((path, way))
            if not options.only_tables and (run is None or not run.answers(options.selection, options.limit)):
                known[path, way] = run_and_keep(options, path, way)
        if not {(path, Way.OWN), (path, Way.DROP_IN)} <= known.keys():
            rest[path] = "not run both ways yet"
    runs = {key: run for key, run in sorted(known.items()) if is_named(key[0], options.files)}
    print(*render_drop_in(compare_ways(runs)), sep="\n\n")
    print_rest(rest)
    exceptions = tomllib.loads(EXCEPTIONS.read_text(encoding="utf-8"))
    slower = {path for entry in exceptions.get("below_two", []) for path in entry["paths"]}
    unexpected = list(find_unexpected(runs, {}, [entry["message"] for entry in exceptions["difference"]], slower))
    print("\n".join(f"UNEXPECTED {line}" for line in unexpected))
    return int(bool(unexpected))


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", help="test files and folders, relative to the root")
    parser.add_argument("--root", type=Path, required=True, help="PyTorch's folder test/distributed")
    parser.add_argument("--jsonl", type=Path, required=True, help="the file that keeps the runs, one a line")
    parser.add_argument("--cpu-devices", type=int, default=0, help="count the CPU as so many devices")
    parser.add_argument("--on-cpu", action="store_true", help="replace CUDA and NCCL by the CPU and gloo")
    parser.add_argument("--sample", type=int, default=0, help="tests of a file; 0 means all (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="draw the tests by this number instead of spreading them evenly")
    parser.add_argument("--limit", type=float, default=600, help="seconds for one file (default: %(default)s)")
    parser.add_argument("--test-limit", type=int, default=300, help="seconds for one test (default: %(default)s)")
    parser.add_argument("--only-tables", action="store_true", help="run nothing, print the tables")
    options = parser.parse_args()
    options.selection = Selection(options.sample, options.seed)
    return options


def read_runs(file: Path) -> dict[tuple[str, Way], FileRun]:
    """Return the last run that ``file`` has of each path in each way."""
    runs = map(FileRun.from_json, file.read_text().splitlines() if file.exists() else ())
    return {(run.path, run.way): run for run in runs}


def is_named(path: str, names: list[str]) -> bool:
    """Return whether ``path`` is one of ``names``, or in a folder of that name."""
    return any(path == name or path.startswith(f"{name.rstrip('/')}/") for name in names)


def find_files(root: Path, names: list[str]) -> Iterator[str]:
    """Yield the test files that ``names`` stand for, relative to ``root``; small files first."""
    files = {
        file for name in names for file in ([root / name] if (root / name).is_file() else list_folder(root / name))
    }
    for file in sorted(files, key=lambda file: (file.stat().st_size, file)):
        yield str(file.relative_to(root))


def list_folder(folder: Path) -> list[Path]:
    """Return the test files below ``folder``. Ends the program if there is none."""
    return sorted(folder.rglob("test_*.py")) or sys.exit(f"{folder}: no test_*.py there")


def swap_imports(text: str) -> str:
    """Return the source of a test file with the drop-ins in the place of PyTorch's classes that start ranks."""
    for pattern, replacement in SWAPS:
        text = re.sub(pattern, replacement, text)
    return text


def run_and_keep(options: argparse.Namespace, path: str, way: Way) -> FileRun:
    """Run one file in one way, append the run to the file of results, and return it."""
    run = run_file(options, path, way)
    with options.jsonl.open("a") as file:
        file.write(run.to_json() + "\n")
    print(f"{path} {way.value}: {run.describe()} in {run.seconds} s", file=sys.stderr, flush=True)
    return run


def run_file(options: argparse.Namespace, path: str, way: Way) -> FileRun:
    """Run one file in a pytest process of its own, in a copy of its folder."""
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as folder:
        root = copy_tests(options, path, Path(folder) / "tests", way)
        plugin = ["-p", "zharness.plugin"] if way is Way.DROP_IN else []
        command = [sys.executable, "-m", "pytest", *OPTIONS, *plugin, f"--basetemp={folder}/temp", path]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, ((root / path).parent, root, ROOT, ROOT / "scripts"))),
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(options.test_limit),
            "ZHARNESS_CPU_DEVICES": str(options.cpu_devices or ""),
        }
        return measure_run(path, way, options.selection, options.limit, command, root, environment)


def copy_tests(options: argparse.Namespace, path: str, target: Path, way: Way) -> Path:
    """Copy the folder of the file to ``target``, and change the file as requested; return ``target``.

    In PyTorch's own way each process that imports the file is counted.
    """
    shutil.copytree((options.root / path).parent, (target / path).parent)
    text = (target / path).read_text(encoding="utf-8")
    if options.on_cpu:
        text = port_to_cpu(text)
    if options.cpu_devices:
        text = FIRST_IMPORT.sub(COUNT_CPUS, text, count=1)
    text = swap_imports(text) if way is Way.DROP_IN else FIRST_IMPORT.sub(COUNT_PROCESS.lstrip(), text, count=1)
    (target / path).write_text(text, encoding="utf-8")
    return target


def port_to_cpu(text: str) -> str:
    """Return the source of a test file with the CPU and gloo in the place of CUDA and NCCL.

    DistributedDataParallel gets no ``device_ids``, which it refuses for a model on the CPU.
    """
    for pattern, replacement in CPU_NAMES:
        text = re.sub(pattern, replacement, text)
    return DEVICE_IDS.sub("", text)


def print_rest(reasons: dict[str, str]) -> None:
    """Print the files that did not run, with the reason."""
    if reasons:
        rows = [[f"`{path}`", reason] for path, reason in sorted(reasons.items())]
        print("\n" + tabulate(rows, headers=["file", "reason"], tablefmt="github"))


if __name__ == "__main__":
    sys.exit(main())
