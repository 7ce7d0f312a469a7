"""Build or load DeepSpeed's operators for CPUs once, before ranks are forked."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

SHM_VARIABLE = "ZHARNESS_DEEPSPEED_SHM"  # 1: DeepSpeed's collectives on CPUs run through the operator
SHM_OPERATOR = "deepspeed_shm_comm"
ADAM_OPERATOR = "fused_adam"


def load_built_adam(deepspeed: Any) -> None:
    """Load the operator of DeepSpeed's Adam, if it has been built from the sources of this installation.

    Each rank that loads it asks the compiler, ninja and the CPU what they are, in 0.6 CPU seconds. An operator of other
    sources is left alone, because loading it would build it again.
    """
    folder = find_build_folder(ADAM_OPERATOR)
    instructions = folder / "build.ninja"
    if not (folder / f"{ADAM_OPERATOR}.so").exists() or not instructions.exists():
        return
    if f"{Path(deepspeed.__file__).parent}{os.sep}" in instructions.read_text():
        builder = deepspeed.accelerator.get_accelerator().create_op_builder("FusedAdamBuilder")
        # A rank that needs the operator raises the same error, and is named in the report.
        with suppress(ImportError, OSError, RuntimeError):
            build_operator(ADAM_OPERATOR, builder.load)


def find_build_folder(operator: str) -> Path:
    """Return the folder in which torch builds ``operator``; torch makes the folder if it does not exist."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(operator, verbose=False))


def build_operator(operator: str, build: Callable[[], Any]) -> Any:
    """Build or load ``operator`` with DeepSpeed's function ``build``, and return it. Raises what ``build`` raises.

    Other processes that use this function wait. A lock that a killed build has left behind is removed, because torch
    waits for it forever.
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
