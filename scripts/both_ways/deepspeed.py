"""Run a test file of DeepSpeed: with its own fixtures, with the drop-in, or on the reference engine."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from both_ways.family import Family, Source, list_by_size
from both_ways.runs import COUNT_PROCESS, DEVICE_IDS, OWN_CLASSES, TEST_TIMEOUT, FileRun, Selection, Way, run_in_copy
from zharness.engines.deepspeed_operators import remove_stale_lock

FOLDERS = ("v1", "runtime", "checkpoint", "moe", "pipe", "comm", "ops/adam")
COMMON = "from zharness.compat.deepspeed import *\n"
STAND_IN = "zharness.compat.deepspeed_engine.install"


def find_files(tests: Path, text: str) -> list[str]:
    """Return the test files in FOLDERS whose path, relative to ``tests``, contains ``text``; small files first."""
    return list_by_size(
        tests, (file for folder in FOLDERS for file in (tests / "unit" / folder).rglob("test_*.py")), text
    )


def starts_ranks(file: Path) -> bool:
    """Return whether the file uses a class that the drop-in replaces."""
    return "DistributedTest" in file.read_text(encoding="utf-8")


@functools.cache
def build_operators(operators: Path) -> None:
    """Build DeepSpeed's operators for a CPU in the folder ``operators``, which takes minutes the first time.

    A run that was killed during a build leaves a lock that later builds wait for, so it is removed. That of a build
    that still runs is not.
    """
    for lock in operators.glob("*/lock"):
        remove_stale_lock(lock)
    build = (
        "from deepspeed.comm.torch import build_shm_op; "
        "from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, FusedAdamBuilder; "
        "from deepspeed.ops.op_builder.pin_memory import PinMemoryBuilder; "
        "build_shm_op(); FusedAdamBuilder().load(); CPUAdamBuilder().load(); PinMemoryBuilder().load()"
    )
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(operators), "DS_ACCELERATOR": "cpu"}
    subprocess.run([sys.executable, "-c", build], env=environment, stdout=subprocess.DEVNULL, check=True)


def run_file(source: Source, path: str, way: Way, selection: Selection) -> FileRun:
    """Run one file in a pytest process of its own, in a copy of DeepSpeed's folder ``tests``."""
    operators = source.records.resolve() / "operators"
    if way is not Way.STAND_IN:
        build_operators(operators)
    options = ("-m", "not nightly", *list_options(way))
    copy = functools.partial(prepare_tests, source.root, way)
    variables = list_variables(way, operators)
    return run_in_copy(path, way, selection, source.limit, copy, options, variables, [Path()])


def prepare_tests(source: Path, way: Way, target: Path) -> None:
    """Copy DeepSpeed's folder ``tests``, and put the drop-in in the place of ``unit/common.py``.

    DeepSpeed's own fixtures are left there, and each process that imports them is counted. In all ways
    DistributedDataParallel gets no ``device_ids``, which it refuses for a model on the CPU.
    """
    shutil.copytree(source, target)
    common = target / "unit/common.py"
    common.write_text(common.read_text() + COUNT_PROCESS if way in OWN_CLASSES else COMMON)
    for file in (target / "unit").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if "device_ids=" in text:
            file.write_text(DEVICE_IDS.sub("", text), encoding="utf-8")


def list_options(way: Way) -> list[str]:
    """Return the options of pytest for this way. The drop-in runs as it does without options, on new ranks."""
    if way in OWN_CLASSES:
        return []
    plugin = ["-p", "zharness.plugin"]
    return plugin if way is Way.DROP_IN else [*plugin, "--isolation", "pooled", "-p", STAND_IN]


def list_variables(way: Way, operators: Path) -> dict[str, str]:
    """Return the environment variables of the run; DeepSpeed counts ``LOCAL_SIZE`` devices on a CPU."""
    own = {"LOCAL_SIZE": "8"} if way in OWN_CLASSES else {}
    return {
        **own,
        "TORCH_EXTENSIONS_DIR": str(operators),
        "DS_ACCELERATOR": "cpu",
        "DS_UNITTEST_TIMEOUT": TEST_TIMEOUT,
    }


DEEPSPEED = Family("deepspeed", "DeepSpeed", "own fixtures", find_files, starts_ranks, run_file)
