"""Estimate the temporary files that the laws write for a user's model, and require that they fit."""

from __future__ import annotations

import math
import shutil
import tempfile
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from zharness.errors import UsageError
from zharness.laws.state.resume import RECORDED_BUFFERS, RECORDED_SNAPSHOTS
from zharness.run.model_memory import FLOAT32_BYTES, GIB, IGNORE_HINT, IGNORE_OPTION, ModelSize
from zharness.world.limits import available_memory, is_in_memory

# The law state.resume writes the most: its snapshots, records of buffers, and a checkpoint, which has at most the bytes
# of one snapshot and the buffers of each rank.
# The checkpoint is deleted before the last snapshots but is counted with them, because the judge's record of losses and
# names, and the padding between tensors, take less than it. The law model.configured records the gradients of each step
# and one snapshot more than its steps.
CHECKPOINTS = 1
MOMENTS = 2
MIB = 2**20


class Storage(Enum):
    """The medium that holds the bytes of temporary files."""

    DISK = "disk"
    MEMORY = "memory"


@dataclass(frozen=True)
class FreeSpace:
    """The folder of temporary files, its storage, and the bytes that are free in the folder and in memory."""

    path: Path
    storage: Storage
    file_bytes: int
    memory_bytes: int


def measure_free_space() -> FreeSpace:
    """Return the folder in which ranks record tensors, with the free bytes in the folder and in memory."""
    path = Path(tempfile.gettempdir())
    storage = Storage.MEMORY if is_in_memory(path) else Storage.DISK
    return FreeSpace(path, storage, shutil.disk_usage(path).free, available_memory())


def estimate_file_bytes(size: ModelSize, world_size: int, steps: int) -> int:
    """Estimate the maximum number of bytes of one cell's temporary files.

    ``steps`` is the number of steps of ``model.configured``.
    """
    optimizer_bytes = max(size.trained_bytes, FLOAT32_BYTES * size.trained_parameters)
    masters = optimizer_bytes if size.has_masters else 0
    snapshot = size.parameter_bytes + masters + MOMENTS * optimizer_bytes
    resumed = (RECORDED_SNAPSHOTS + CHECKPOINTS) * snapshot + (RECORDED_BUFFERS + CHECKPOINTS) * size.buffer_bytes
    return world_size * max(resumed, (steps + 1) * snapshot + steps * size.trained_bytes)


def format_file_bytes(size: int) -> str:
    """Return a size in GiB, or below 0.1 GiB in whole MiB, rounded up."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{math.ceil(size / MIB)} MiB"


def count_fitting_cells(size: ModelSize, world_size: int, steps: int, free: FreeSpace) -> int:
    """Return how many cells may run at a time, given the memory and the temporary files that each cell needs."""
    memory, files = size.estimate_memory(world_size), estimate_file_bytes(size, world_size, steps)
    in_memory = memory + (files if free.storage is Storage.MEMORY else 0)
    return min(free.memory_bytes // in_memory, free.file_bytes // files)


def explain_files_too_large(size: ModelSize, world_size: int, steps: int, free: FreeSpace) -> str:
    """Explain why the temporary files of one cell do not fit, or return an empty string if they do."""
    files = estimate_file_bytes(size, world_size, steps)
    needed = f"ranks record up to {format_file_bytes(files)} for one law in {free.path}"
    if files > free.file_bytes:
        left = format_file_bytes(free.file_bytes)
        return f"{needed}, where only {left} are free; set TMPDIR to a folder with more"
    memory = size.estimate_memory(world_size)
    if free.storage is Storage.MEMORY and memory + files > free.memory_bytes:
        return (
            f"{needed}, a file system in memory, where files count as memory: with the {memory / GIB:.1f} GiB of the "
            f"processes this is more than the {free.memory_bytes / GIB:.1f} GiB that are free; set TMPDIR to a folder "
            "on a disk"
        )
    return ""


def find_file_problem(
    name: str, size: ModelSize, world_size: int, steps: int, free: FreeSpace, ignore_memory_limit: bool
) -> str:
    """Return a warning if the temporary files of a model do not fit, or an empty string if they do.

    Raises UsageError instead of the warning, unless ``ignore_memory_limit``.
    """
    reason = explain_files_too_large(size, world_size, steps, free)
    if reason and not ignore_memory_limit:
        raise UsageError(f"{name}: {reason}; {IGNORE_HINT}")
    return f"WARNING {name}: {reason}; the laws run nevertheless because of {IGNORE_OPTION}" if reason else ""
