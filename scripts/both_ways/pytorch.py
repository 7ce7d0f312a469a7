"""Run a test file of PyTorch: with its own classes, or with the drop-ins."""

from __future__ import annotations

import functools
import re
import shutil
from pathlib import Path

from both_ways.family import Family, Source, list_by_size
from both_ways.runs import COUNT_PROCESS, DEVICE_IDS, OWN_CLASSES, TEST_TIMEOUT, FileRun, Selection, Way, run_in_copy

PLACES = ("_composable/fsdp", "_tensor", "tensor", "pipelining", "test_collective_utils.py")
# Import swaps as pairs of a pattern and its replacement.
SWAPS = (
    (r"torch\.testing\._internal(\.| import )common_(distributed|fsdp)\b", r"zharness.compat.pytorch\1common_\2"),
    (r"torch\.testing\._internal\.distributed\._tensor\.common_dtensor\b", "zharness.compat.pytorch.common_dtensor"),
)
# What is replaced on a CPU, also names that a later release of torch spells otherwise.
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


def find_files(root: Path, text: str) -> list[str]:
    """Return the test files in PLACES whose path, relative to ``root``, contains ``text``; small files first."""
    places = [root / place for place in PLACES]
    files = (file for place in places for file in ([place] if place.is_file() else place.rglob("test_*.py")))
    return list_by_size(root, files, text)


def starts_ranks(file: Path) -> bool:
    """Return whether the file uses a class that the drop-ins replace."""
    return RANK_CLASS.search(port_to_cpu(file.read_text(encoding="utf-8"))) is not None


def run_file(source: Source, path: str, way: Way, selection: Selection) -> FileRun:
    """Run one file in a pytest process of its own, in a copy of its folder."""
    options = () if way in OWN_CLASSES else ("-p", "zharness.plugin")
    variables = {
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": TEST_TIMEOUT,
        "ZHARNESS_CPU_DEVICES": str(source.cpu_devices or ""),
    }
    copy = functools.partial(copy_tests, source, path, way)
    folders = [Path(path).parent, Path()]
    return run_in_copy(path, way, selection, source.limit, copy, options, variables, folders)


def copy_tests(source: Source, path: str, way: Way, target: Path) -> None:
    """Copy the folder of the file to ``target``, and change the file as requested.

    In PyTorch's own way each process that imports the file is counted.
    """
    shutil.copytree((source.root / path).parent, (target / path).parent)
    text = (target / path).read_text(encoding="utf-8")
    if source.cpu_devices:
        text = FIRST_IMPORT.sub(COUNT_CPUS, port_to_cpu(text), count=1)
    text = FIRST_IMPORT.sub(COUNT_PROCESS.lstrip(), text, count=1) if way in OWN_CLASSES else swap_imports(text)
    (target / path).write_text(text, encoding="utf-8")


def swap_imports(text: str) -> str:
    """Return the source of a test file with the drop-ins in the place of PyTorch's classes that start ranks."""
    for pattern, replacement in SWAPS:
        text = re.sub(pattern, replacement, text)
    return text


def port_to_cpu(text: str) -> str:
    """Return the source of a test file with the CPU and gloo in the place of CUDA and NCCL.

    DistributedDataParallel gets no ``device_ids``, which it refuses for a model on the CPU.
    """
    for pattern, replacement in CPU_NAMES:
        text = re.sub(pattern, replacement, text)
    return DEVICE_IDS.sub("", text)


PYTORCH = Family("pytorch", "PyTorch", "PyTorch's classes", find_files, starts_ranks, run_file)
