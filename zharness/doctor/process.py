"""Inspect this process: installed versions, torch's settings and functions, and whether ranks can be forked from it."""

from __future__ import annotations

import multiprocessing
import os
import platform
import sys
from collections.abc import Iterator

import torch

import zharness
from zharness.device import require_reproducible_kernels
from zharness.doctor.finding import Finding, Severity, make_finding, ok_finding
from zharness.engines import registered_engines
from zharness.parity.contamination import ProcessConditions, read_process_conditions
from zharness.world.launch import detect_launch

SUPPORTED_PYTHONS = ((3, 10), (3, 13))
# The expected value of each setting of ``read_process_conditions``, and the remedy; other settings may have any value.
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
    """Inspect the versions of Python, this package, torch and every registered engine."""
    (oldest, newest), current = SUPPORTED_PYTHONS, sys.version_info[:2]
    text = f"{platform.python_version()} on {platform.platform()}"
    remedy = "use Python 3.10 to 3.13, with which this package is tested"
    yield make_finding("python", text, Severity.WARNING, not oldest <= current <= newest, remedy)
    yield ok_finding("zharness", zharness.__version__)
    yield ok_finding("torch", torch.__version__)
    for info in registered_engines().values():
        yield ok_finding(f"engine {info.name}", info.version() or f"not installed; to test it: {info.install}")


def inspect_fork_support() -> Iterator[Finding]:
    """Inspect whether a rank server can be forked from this process.

    The system has to support fork and pidfd_open, CUDA must not be initialized, and torchrun must not have started this
    process.
    """
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    text = "available" if can_fork else "not available"
    remedy = "ranks are forked: run on Linux, or in WSL on Windows"
    yield make_finding("fork", text, Severity.PROBLEM, not can_fork, remedy)
    can_watch = hasattr(os, "pidfd_open")
    text = "can be watched" if can_watch else "cannot be watched: no pidfd_open"
    yield make_finding("child processes", text, Severity.PROBLEM, not can_watch, "use Linux 5.3 or newer")
    is_initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    text = "initialised in this process" if is_initialized else "not initialised"
    remedy = "ranks cannot be forked after CUDA is initialised: find the import that uses a GPU and remove it"
    yield make_finding("CUDA", text, Severity.PROBLEM, is_initialized, remedy)
    launch = detect_launch()
    text = "none" if launch is None else "RANK, WORLD_SIZE and MASTER_ADDR are set"
    remedy = "`zharness check` uses torchrun's ranks and forks none; unset these variables if that is not intended"
    yield make_finding("launcher", text, Severity.WARNING, launch is not None, remedy)


def inspect_torch_settings() -> Iterator[Finding]:
    """Inspect torch's global settings that change numerical results, and whether torch's functions were replaced.

    The settings of kernels are first set as a rank on a GPU sets them when it starts.
    This function runs tensor operations, so no rank can be forked from this process afterwards.
    """
    require_reproducible_kernels()
    conditions = read_process_conditions()
    for name, value in conditions.settings.items():
        expected, remedy = EXPECTED_SETTINGS.get(name, (value, ""))
        text = {"True": "yes", "False": "no"}.get(value, value)
        yield make_finding(name.removeprefix("the "), text, Severity.WARNING, value != expected, remedy)
    yield inspect_replaced_functions(conditions)


def inspect_replaced_functions(current_conditions: ProcessConditions) -> Finding:
    """Inspect whether another package has replaced functions of torch."""
    if not current_conditions.replacements:
        return ok_finding("functions of torch", "none was replaced")
    remedy = "the baseline needs torch's own functions: find the import that replaces them, and remove it"
    return Finding("functions of torch", Severity.PROBLEM, "; ".join(current_conditions.replacements), remedy)
