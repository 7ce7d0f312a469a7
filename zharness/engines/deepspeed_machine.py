"""Find out, without importing DeepSpeed, which of its compiled operations this machine can run."""

from __future__ import annotations

import os
import shutil
import sys
from functools import cache
from pathlib import Path

from zharness.device import is_gpu_requested

_INCLUDE_FOLDERS = ("/usr/include", "/usr/local/include")
_BUILD_FUSED_ADAM = "python -c 'from deepspeed.ops.op_builder import FusedAdamBuilder; FusedAdamBuilder().load()'"
_BUILD_CPU_ADAM = (
    "DS_ACCELERATOR=cpu python -c 'from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()'"
)


@cache
def missing_for_nvme() -> str:
    """Return what this machine lacks for offloading to NVMe, or '' if it lacks nothing."""
    if not _has_compiler():
        return "offloading to NVMe compiles an operation, and this machine has no C++ compiler"
    folders = (*_INCLUDE_FOLDERS, *filter(None, os.environ.get("CPATH", "").split(os.pathsep)))
    if not any((Path(folder) / "libaio.h").is_file() for folder in folders):
        return "offloading to NVMe needs libaio, whose header libaio.h this machine does not have (apt: libaio-dev)"
    return ""


@cache
def missing_for_cpu_adam() -> str:
    """Return what this machine lacks for DeepSpeedCPUAdam, or '' if it lacks nothing.

    An operation that is not built yet counts as missing, because its build takes longer than a cell may.
    """
    if any(library for folder in _op_folders() for library in folder.glob("**/cpu_adam*.so")):
        return ""
    if not _has_compiler():
        return "DeepSpeedCPUAdam compiles an operation, and this machine has no C++ compiler"
    return f"the operation of DeepSpeedCPUAdam is not built yet; build it with: {_BUILD_CPU_ADAM}"


@cache
def missing_for_fused_adam() -> str:
    """Return what this machine lacks for DeepSpeed's FusedAdam, a kernel of CUDA, or '' if it lacks nothing."""
    if not is_gpu_requested():
        return "FusedAdam is a kernel of CUDA; with --device cuda it runs"
    if any(library for folder in _op_folders() for library in folder.glob("**/fused_adam*.so")):
        return ""
    if not _has_compiler() or shutil.which("nvcc") is None:
        return "FusedAdam compiles an operation, which needs a C++ compiler and CUDA's nvcc on PATH"
    return f"the operation of FusedAdam is not built yet; build it with: {_BUILD_FUSED_ADAM}"


def _has_compiler() -> bool:
    """Return whether a C++ compiler is on PATH."""
    return shutil.which(os.environ.get("CXX", "c++")) is not None


def _op_folders() -> tuple[Path, ...]:
    """Return the folders in which a compiled operation of DeepSpeed lies: built at first use, or installed with it."""
    default = Path.home() / ".cache" / "torch_extensions"
    built = Path(os.environ.get("TORCH_EXTENSIONS_DIR", default))
    installed = (Path(entry) / "deepspeed" / "ops" / "adam" for entry in sys.path)
    return tuple(folder for folder in (built, *installed) if folder.is_dir())
