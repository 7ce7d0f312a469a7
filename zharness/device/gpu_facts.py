"""Read facts that ranks on GPUs need from the driver, without starting CUDA: GPUs, compute mode, memory and MPS."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

QUERY = "index,name,driver_version,compute_mode,memory.free,memory.total,compute_cap"
# A CUDA context with cuBLAS's workspace takes 0.5 GiB of an H100; the tensors of a law take very little.
CONTEXT_MIB = 600
# The memory that a context takes on this machine; ``zharness doctor`` measures it.
CONTEXT_VARIABLE = "ZHARNESS_CONTEXT_MIB"
SHARED_MODE = "Default"
NVIDIA_SMI_SECONDS = 30


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi describes it; memory is in MiB. A value that the driver does not report is None."""

    index: int
    name: str
    driver: str
    compute_mode: str
    free_mib: int | None
    total_mib: int | None
    capability: float | None = None

    @property
    def is_shared(self) -> bool:
        """Return whether several processes may use the GPU at once."""
        return self.compute_mode == SHARED_MODE

    @property
    def context_mib(self) -> int:
        """Return the memory that is planned for the CUDA context of a process."""
        text = os.environ.get(CONTEXT_VARIABLE, "")
        return int(text) if text.isdigit() and int(text) else CONTEXT_MIB

    @property
    def largest_context_count(self) -> int | None:
        """Return how many processes fit into the free memory, or None if it is not known."""
        return None if self.free_mib is None else self.free_mib // self.context_mib


def read_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that nvidia-smi lists and CUDA_VISIBLE_DEVICES names.

    The tuple is empty if there is no nvidia-smi or no driver, or if nvidia-smi does not answer.
    """
    if shutil.which("nvidia-smi") is None:
        return ()
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=NVIDIA_SMI_SECONDS)
    except subprocess.TimeoutExpired:
        return ()
    found = [parse_gpu(line) for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return tuple(gpu for gpu in found if gpu is not None and is_visible(gpu))


def parse_gpu(line: str) -> Gpu | None:
    """Return the GPU that one line of nvidia-smi's output describes, or None for a line of another form."""
    index, *parts = (part.strip() for part in line.split(","))
    if not index.isdigit() or len(parts) != len(QUERY.split(",")) - 1:
        return None
    name, driver, mode, *memory, capability = parts
    free, total = (int(part) if part.isdigit() else None for part in memory)
    is_told = capability.replace(".", "", 1).isdigit()
    return Gpu(int(index), name, driver, mode, free, total, float(capability) if is_told else None)


def is_visible(gpu: Gpu) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES names the GPU by its index; GPUs named by UUID all count as visible."""
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return not names or not all(name.isdigit() for name in names) or str(gpu.index) in names


def is_mps_running() -> bool:
    """Return whether the daemon of CUDA's multi-process service answers in this environment's folder."""
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))  # noqa: S108 - CUDA's own default
    return (folder / "control").exists()


def find_gpu_problem(cuda_version: str | None, visible: int, gpus: tuple[Gpu, ...], processes: int) -> str:
    """Return the reason why ``processes`` processes cannot compute on the GPUs, with a remedy, or an empty string.

    ``cuda_version`` is the version in torch's build, and ``visible`` is the number of GPUs that torch may use.
    """
    if cuda_version is None:
        return "this build of torch has no CUDA: install one that has (pip install torch, on Linux)"
    if visible == 0:
        return (
            "torch sees no GPU: see that nvidia-smi lists one and that CUDA_VISIBLE_DEVICES, if it is set, names it; "
            "or unset ZHARNESS_DEVICE"
        )
    shares_gpu = processes > visible
    for gpu in gpus:
        if shares_gpu and not gpu.is_shared:
            return (
                f"GPU {gpu.index} is in compute mode {gpu.compute_mode}, which allows only one process on it: set "
                "it back with 'nvidia-smi -c DEFAULT'"
            )
        if gpu.largest_context_count is not None and processes > gpu.largest_context_count * len(gpus):
            return (
                f"{processes} processes need about {processes * gpu.context_mib} MiB for their CUDA contexts, and GPU "
                f"{gpu.index} has {gpu.free_mib} MiB free: use fewer --jobs or a smaller --world-size, or end what "
                "else uses the GPU (nvidia-smi lists it)"
            )
    return ""
