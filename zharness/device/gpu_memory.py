"""Count and limit the GPU memory of each rank, and measure the memory of a CUDA context."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from zharness.device.gpu_facts import Gpu
from zharness.errors import UsageError

# The variable with the memory in MiB that torch may allocate in each process; a command sets it for ranks and judges.
SHARE_VARIABLE = "ZHARNESS_GPU_MIB"
MIB = 2**20
# cuBLAS's workspaces take 32 MiB for each stream: with a smaller share, cells whose tensors fit would fail.
LEAST_SHARE_MIB = 256
# Starts CUDA with cuBLAS's handle and workspace, as the first product of a rank does, and prints torch's allocation.
CONTEXT_SCRIPT = (
    "import torch; a = torch.ones(256, 256, device='cuda'); (a @ a).sum().item(); "
    "print(torch.cuda.memory_reserved() // 2**20, flush=True); input()"
)


@dataclass(frozen=True)
class GpuMemory:
    """The peaks of one rank in one task, in MiB: the memory of its tensors, and the memory of torch's allocator.

    The memory of the process's CUDA context is not included.
    """

    allocated_mib: float
    reserved_mib: float


def begin_count() -> None:
    """Reset the peaks to start a new count, if this process uses CUDA already."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.reset_peak_memory_stats()


def read_peaks() -> GpuMemory | None:
    """Return the peaks since ``begin_count``, or None if this process has not used CUDA."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return GpuMemory(torch.cuda.max_memory_allocated() / MIB, torch.cuda.max_memory_reserved() / MIB)


def smallest_free_mib(gpus: tuple[Gpu, ...]) -> int | None:
    """Return the smallest free memory of a GPU, in MiB; None if some GPU does not report it, or there is no GPU."""
    free = [gpu.free_mib for gpu in gpus if gpu.free_mib is not None]
    return min(free) if free and len(free) == len(gpus) else None


def choose_share(gpus: tuple[Gpu, ...], processes: int) -> int | None:
    """Return how many MiB torch may allocate in each of ``processes`` processes, so that all processes fit together.

    The share is an equal part of the free memory without the CUDA context, and at least LEAST_SHARE_MIB. It is None if
    the free memory is not known.
    """
    free = smallest_free_mib(gpus)
    if free is None:
        return None
    on_one = -(-processes // len(gpus))
    return max(LEAST_SHARE_MIB, free // on_one - gpus[0].context_mib)


def bound_memory(device: torch.device) -> None:
    """Limit torch's memory on ``device`` in this process to ``ZHARNESS_GPU_MIB``, if that is set. Starts CUDA.

    A rank that needs more memory then ends with torch's out-of-memory error, and does not use the share of other ranks.
    """
    text = os.environ.get(SHARE_VARIABLE)
    if not text:
        return
    if not text.isdigit() or int(text) == 0:
        raise UsageError(f"{SHARE_VARIABLE} is {text!r}; expected the MiB that torch may take in each process: 4000")
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, int(text) * MIB / total), device)


def measure_context_mib(read_free_mib: Callable[[], int | None]) -> int | None:
    """Return the MiB of a CUDA context on the first GPU, without torch's tensors; None if it cannot be measured.

    ``read_free_mib`` returns the free memory. The result is wrong if another process takes or frees memory meanwhile.
    """
    before = read_free_mib()
    process = subprocess.Popen(
        [sys.executable, "-c", CONTEXT_SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline().strip() if process.stdout else ""
        after = read_free_mib()
    finally:
        process.kill()
        process.communicate()
    if before is None or after is None or not line.isdigit():
        return None
    return max(0, before - after - int(line))
