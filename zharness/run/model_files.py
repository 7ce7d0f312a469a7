"""Estimate the temporary files that the laws write for a user's model, and require that they fit."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from zharness.errors import UsageError
from zharness.run.model_memory import FLOAT32_BYTES, GIB, IGNORE_HINT, IGNORE_OPTION, ModelSize
from zharness.world.limits import available_memory, is_in_memory

# Snapshots of weights, master weights and two moments that a rank records for one cell: state.resume records one engine
# before it saves, and then two engines three times each. model.configured records one more than it trains steps, and
# the gradients of each step.
RESUME_SNAPSHOTS = 7
MOMENTS = 2


@dataclass(frozen=True)
class TemporaryFolder:
    """The folder of temporary files, the bytes that are free there, and what they are taken from."""

    path: Path
    free_bytes: int
    kind: str


DISK, MEMORY = "the disk", "a file system in memory, where files count as memory"


def measure_temporary_folder() -> TemporaryFolder:
    """Return the folder in which ranks record tensors, with what is free there."""
    path = Path(tempfile.gettempdir())
    return TemporaryFolder(path, shutil.disk_usage(path).free, MEMORY if is_in_memory(path) else DISK)


def estimate_file_bytes(size: ModelSize, world_size: int, steps: int) -> int:
    """Estimate the most bytes of temporary files of one cell.

    ``steps`` is the number of steps of ``model.configured``.
    """
    optimizer_bytes = max(size.trained_bytes, FLOAT32_BYTES * size.trained_parameters)
    masters = optimizer_bytes if size.has_masters else 0
    snapshot = size.parameter_bytes + masters + MOMENTS * optimizer_bytes
    return world_size * max(RESUME_SNAPSHOTS * snapshot, (steps + 1) * snapshot + steps * size.trained_bytes)


def count_fitting_cells(size: ModelSize, world_size: int, steps: int, folder: TemporaryFolder) -> int:
    """Return how many cells may run at a time, by the memory and the temporary files that each takes."""
    memory, files = size.estimate_memory(world_size), estimate_file_bytes(size, world_size, steps)
    in_memory = memory + (files if folder.kind == MEMORY else 0)
    return min(available_memory() // in_memory, folder.free_bytes // files)


def explain_files_too_large(size: ModelSize, world_size: int, steps: int, folder: TemporaryFolder) -> str:
    """Explain why the temporary files of one cell do not fit, or return an empty string if they do."""
    files = estimate_file_bytes(size, world_size, steps)
    needed = f"ranks record up to {files / GIB:.1f} GiB for one law in {folder.path}"
    if files > folder.free_bytes:
        return f"{needed}, where only {folder.free_bytes / GIB:.1f} GiB are free; set TMPDIR to a folder with more"
    memory, free = size.estimate_memory(world_size), available_memory()
    if folder.kind == MEMORY and memory + files > free:
        return (
            f"{needed}, {MEMORY}: with the {memory / GIB:.1f} GiB of the processes this is more than the "
            f"{free / GIB:.1f} GiB that are free; set TMPDIR to a folder on a disk"
        )
    return ""


def find_file_problem(name: str, size: ModelSize, world_size: int, steps: int, ignore_memory_limit: bool) -> str:
    """Return a warning if the temporary files of a model do not fit, or an empty string if they do.

    Raises UsageError instead of the warning, unless ``ignore_memory_limit``.
    """
    reason = explain_files_too_large(size, world_size, steps, measure_temporary_folder())
    if reason and not ignore_memory_limit:
        raise UsageError(f"{name}: {reason}; {IGNORE_HINT}")
    return f"WARNING {name}: {reason}; the laws run nevertheless because of {IGNORE_OPTION}" if reason else ""
