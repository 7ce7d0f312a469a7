"""Build DeepSpeed's shared-memory operator for collectives on CPUs, once for all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

SHM_VARIABLE = "ZHARNESS_DEEPSPEED_SHM"  # 1: DeepSpeed's collectives on CPUs run through the operator
OPERATOR = "deepspeed_shm_comm"


def build_shm_operator(build: Callable[[], Any]) -> Any:
    """Build or load the operator with DeepSpeed's function ``build``, and return it; None if it cannot be built here.

    Other processes that use this function wait. A lock that a killed build has left behind is removed, because torch
    waits for it forever.
    """
    from torch.utils.cpp_extension import _get_build_directory

    folder = Path(_get_build_directory(OPERATOR, verbose=False))
    with FileLock(folder.with_name(f"{OPERATOR}.zharness.lock")):
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
