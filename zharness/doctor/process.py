"""What this process is: versions, engines, torch's settings and functions, and whether ranks can be forked from it."""

from __future__ import annotations

import multiprocessing
import os
import platform
import sys
from collections.abc import Iterator

import torch

import zharness
from zharness.doctor.finding import Finding, Severity, make_finding, ok_finding
from zharness.engines import registered_engines
from zharness.parity.contamination import ProcessConditions, read_process_conditions
from zharness.world.launch import detect_launch

SUPPORTED_PYTHONS = ((3, 10), (3, 13))
# What the settings of ``conditions`` have to be; the rest has no wrong value.
EXPECTED_SETTINGS = {
    "the default dtype": ("torch.float32", "call torch.set_default_dtype(torch.float32)"),
    "the precision of float32 products": ("highest", "call torch.set_float32_matmul_precision('highest')"),
    "flushing of subnormals": ("False", "call torch.set_flush_denormal(False)"),
    "deterministic kernels": ("True", "call torch.use_deterministic_algorithms(True), or run on CPU"),
    "TF32 in products": ("False", "set torch.backends.cuda.matmul.allow_tf32 = False"),
    "TF32 in convolutions": ("False", "set torch.backends.cudnn.allow_tf32 = False"),
    "kernels chosen by their speed": ("False", "set torch.backends.cudnn.benchmark = False"),
}


def inspect_versions() -> Iterator[Finding]:
    """Python, torch, this package, and every engine that is registered."""
    (least, most), here = SUPPORTED_PYTHONS, sys.version_info[:2]
    spoken = f"{platform.python_version()} on {platform.platform()}"
    remedy = "take Python 3.10 to 3.13, which this package is tested on"
    yield make_finding("python", spoken, Severity.WARNING, not least <= here <= most, remedy)
    yield ok_finding("zharness", zharness.__version__)
    yield ok_finding("torch", torch.__version__)
    for info in registered_engines().values():
        version = info.version()
        words = version or f"not installed; to test it: {info.install}"
        yield ok_finding(f"engine {info.name}", words)


def inspect_fork_support() -> Iterator[Finding]:
    """What a rank server asks of the process that it is forked from."""
    forks = "fork" in multiprocessing.get_all_start_methods()
    words = "available" if forks else "not available"
    yield make_finding(
        "fork", words, Severity.PROBLEM, not forks, "ranks are forked: run on Linux, or in WSL on Windows"
    )
    watched = hasattr(os, "pidfd_open")
    words = "can be watched" if watched else "cannot be watched: no pidfd_open"
    yield make_finding("child processes", words, Severity.PROBLEM, not watched, "take Linux 5.3 or newer")
    touched = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    words = "initialised in this process" if touched else "not initialised"
    remedy = "no rank can be forked after that: find who touches a GPU while it is imported (a sitecustomize, a plugin)"
    yield make_finding("CUDA", words, Severity.PROBLEM, touched, remedy)
    launch = detect_launch()
    words = "none" if launch is None else "RANK, WORLD_SIZE and MASTER_ADDR are set"
    remedy = "`zharness check` joins that launcher's ranks and starts none; unset them where that is not meant"
    yield make_finding("launcher", words, Severity.WARNING, launch is not None, remedy)


def inspect_torch_settings() -> Iterator[Finding]:
    """What numbers depend on beside the code. Runs tensor operations: no rank can be forked after it."""
    here = read_process_conditions()
    for name, value in here.settings.items():
        wanted, remedy = EXPECTED_SETTINGS.get(name, (value, ""))
        words = {"True": "yes", "False": "no"}.get(value, value)
        yield make_finding(name.removeprefix("the "), words, Severity.WARNING, value != wanted, remedy)
    yield inspect_replaced_functions(here)


def inspect_replaced_functions(current_conditions: ProcessConditions) -> Finding:
    """Whether torch's functions are torch's."""
    if not current_conditions.replacements:
        return ok_finding("functions of torch", "all torch's own")
    remedy = "a baseline cannot run beside them: find who replaces them while it is imported, and run without it"
    return Finding("functions of torch", Severity.PROBLEM, "; ".join(current_conditions.replacements), remedy)
