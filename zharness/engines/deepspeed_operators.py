"""Build or load DeepSpeed's operators for CPUs once, before ranks are forked."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from filelock import FileLock

SHM_VARIABLE = "ZHARNESS_DEEPSPEED_SHM"  # 1: DeepSpeed's collectives on CPUs run through the operator
SHM_OPERATOR = "deepspeed_shm_comm"
ADAM_BUILDERS = {"fused_adam": "FusedAdamBuilder", "cpu_adam": "CPUAdamBuilder"}


# The option of DeepSpeed's builds for the vector instructions that torch finds on this CPU.
VECTOR_OPTIONS = {"AVX512": "-D__AVX512__", "AVX2": "-D__AVX256__"}


def load_built_adam(deepspeed: Any) -> None:
    """Load those operators of DeepSpeed's Adam that have been built from the sources of this installation.

    DeepSpeed's own load would query the compiler, ninja and the CPU on each rank, which takes 0.6 CPU seconds. An
    operator that was built from other sources is not loaded, because loading it would build it again.
    """
    package = Path(deepspeed.__file__).parent
    for operator, builder_name in ADAM_BUILDERS.items():
        library = find_build_folder(operator) / f"{operator}.so"
        instructions = library.with_name("build.ninja")
        if library.exists() and instructions.exists() and f"{package}{os.sep}" in instructions.read_text():
            builder = deepspeed.accelerator.get_accelerator().create_op_builder(builder_name)
            # A rank that needs the operator raises the same error later, and the report then names the rank.
            with suppress(ImportError, OSError, RuntimeError):
                load_operator(library, instructions.read_text(), package, builder)


def load_operator(library: Path, instructions: str, package: Path, builder: Any) -> None:
    """Load a built operator so that ``builder`` has it; ask ``builder`` for it only if in doubt."""
    if is_up_to_date(library, instructions, package) and hasattr(builder, "_loaded_ops"):
        builder._loaded_ops[library.stem] = import_library(library)  # where builder.load looks first
    else:
        build_operator(library.stem, builder.load)


def is_up_to_date(library: Path, instructions: str, package: Path) -> bool:
    """Return whether a built operator is newer than torch and DeepSpeed's sources, and has this CPU's vector option.

    ``builder.load`` checks the same with ninja and a new Python process, which takes a second. Returns False if in
    doubt.
    """
    option = VECTOR_OPTIONS.get(torch.backends.cpu.get_cpu_capability())
    if option is None or option not in instructions.split():
        return False
    sources = (Path(torch.version.__file__), *(package / "ops" / "csrc").rglob("*"))
    return max(source.stat().st_mtime for source in sources) < library.stat().st_mtime


def import_library(library: Path) -> ModuleType:
    """Import a built operator as a Python module. Raises ImportError if it does not fit this Python or torch."""
    spec = importlib.util.spec_from_file_location(library.stem, library)
    if spec is None or spec.loader is None:
        raise ImportError(f"{library} is no Python module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find_build_folder(operator: str) -> Path:
    """Return the folder in which torch builds ``operator``; torch makes the folder if it does not exist."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(operator, verbose=False))


def build_operator(operator: str, build: Callable[[], Any]) -> Any:
    """Build or load ``operator`` with DeepSpeed's function ``build``, and return it. Raises what ``build`` raises.

    Other processes that call this function wait. The function removes a lock that a killed build left behind, because
    torch would wait for this lock forever.
    """
    folder = find_build_folder(operator)
    with FileLock(folder.with_name(f"{operator}.zharness.lock")):
        remove_stale_lock(folder / "lock")
        return build()


def remove_stale_lock(lock: Path) -> None:
    """Remove torch's lock file if no process has it open: torch keeps it open while it builds."""
    if lock.exists() and not is_open_anywhere(lock):
        lock.unlink(missing_ok=True)


def is_open_anywhere(path: Path) -> bool:
    """Return whether a process of this machine has the file open, as far as this user can see."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if os.readlink(link) == str(path.resolve()):
                return True
    return False
