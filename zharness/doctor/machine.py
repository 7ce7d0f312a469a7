"""Inspect the machine: its cores, memory, resource limits, devices, loopback interface and disk space."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from zharness.device import compute_device_type
from zharness.device.gpu_facts import CONTEXT_VARIABLE, Gpu, is_mps_running, read_gpus
from zharness.device.gpu_memory import measure_context_mib
from zharness.doctor.finding import Finding, Severity, format_bytes, make_finding, ok_finding
from zharness.world.limits import CGROUP_ROOT, RANK_BYTES, cgroup_memory_left, free_memory, largest_world_size

GIB = 2**30
LOW_MEMORY_BYTES = 2 * GIB  # for the rank server, a judge and two ranks of DeepSpeed, each with its modules imported
LOW_RESOURCE_LIMIT = 256
LOW_DISK_BYTES = GIB
LOW_SHARED_MEMORY_BYTES = 64 * 2**20  # the default size in a container


def inspect_machine(cache_dir: Path) -> Iterator[Finding]:
    """Yield every finding about the machine; ``cache_dir`` is the folder in which engine releases are cached."""
    yield inspect_cores()
    yield inspect_memory()
    yield inspect_largest_world_size()
    yield inspect_open_files()
    yield inspect_processes()
    yield inspect_temporary_folder(Path(tempfile.gettempdir()))
    yield inspect_shared_memory(Path("/dev/shm"))  # noqa: S108 - the name of a mount, nothing is written there
    yield inspect_loopback()
    yield from inspect_backends()
    yield inspect_devices()
    yield from inspect_gpus(gpus := read_gpus())
    if gpus and torch.version.cuda is not None:
        yield inspect_context(gpus[0], measure_context_mib(read_first_free_mib))
    yield inspect_release_cache(cache_dir)


def inspect_cores() -> Finding:
    """Inspect the cores that this process may use, and the CPU quota of its cgroup."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = parse_cpu_quota((CGROUP_ROOT / "cpu.max").read_text() if (CGROUP_ROOT / "cpu.max").exists() else "max")
    allowed = usable if quota is None else min(usable, quota)
    text = f"{usable} usable of {os.cpu_count()}" + ("" if quota is None else f", {quota:g} allowed by the cgroup")
    remedy = "two ranks share one core, so they may exceed their time limit: allow more cores or raise --timeout"
    return make_finding("cores", text, Severity.WARNING, allowed < 2, remedy)


def parse_cpu_quota(text: str) -> float | None:
    """Return the number of cores in a cgroup's ``cpu.max`` ("QUOTA PERIOD" in microseconds), or None if unlimited."""
    quota, *period = text.split()
    return None if quota == "max" or not period else int(quota) / int(period[0])


def inspect_memory() -> Finding:
    """Inspect the memory that new processes can use: the free memory or the cgroup's allowance, whichever is less."""
    free, limit = free_memory(), cgroup_memory_left()
    text = f"{format_bytes(free)} free" + ("" if limit is None else f", {format_bytes(limit)} allowed by the cgroup")
    available = free if limit is None else min(free, limit)
    remedy = "end other programs or raise the limit; --jobs 1 runs one cell at a time"
    severity = Severity.PROBLEM if available < 4 * RANK_BYTES else Severity.WARNING
    return make_finding("memory", text, severity, available < LOW_MEMORY_BYTES, remedy)


def inspect_largest_world_size() -> Finding:
    """Inspect the largest world size that this machine can start; a size below 2 is a problem."""
    largest, reason = largest_world_size()
    remedy = f"increase {reason}"
    return make_finding("largest world size", f"{largest} ({reason})", Severity.PROBLEM, largest < 2, remedy)


def inspect_open_files() -> Finding:
    """Inspect the hard limit on open files, to which every rank server raises its soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_low = hard != resource.RLIM_INFINITY and hard < LOW_RESOURCE_LIMIT
    return make_finding(
        "open files",
        f"{format_limit(soft)}, at most {format_limit(hard)}",
        Severity.WARNING,
        is_low,
        "raise the limit: ulimit -Hn 4096",
    )


def inspect_processes() -> Finding:
    """Inspect how many processes this user may run at the same time."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    is_low = soft != resource.RLIM_INFINITY and soft < LOW_RESOURCE_LIMIT
    return make_finding("processes", format_limit(soft), Severity.WARNING, is_low, "raise the limit: ulimit -u 4096")


def format_limit(value: int) -> str:
    """Format a resource limit as text: a number or ``unlimited``."""
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def inspect_temporary_folder(path: Path) -> Finding:
    """Inspect the free disk space of the temporary folder, to which ranks write their tensors for the judge."""
    free = shutil.disk_usage(path).free
    remedy = "free disk space, or set TMPDIR to a folder with more: ranks write copies of weights and gradients there"
    severity = Severity.PROBLEM if free < LOW_SHARED_MEMORY_BYTES else Severity.WARNING
    return make_finding(
        "temporary folder", f"{format_bytes(free)} free at {path}", severity, free < LOW_DISK_BYTES, remedy
    )


def inspect_shared_memory(path: Path) -> Finding:
    """Inspect the free shared memory. NCCL and data loaders with workers need shared memory; gloo does not."""
    if not path.is_dir():
        return Finding(
            "shared memory", Severity.WARNING, f"no {path}", "mount a tmpfs there: NCCL needs it, gloo does not"
        )
    usage = shutil.disk_usage(path)
    remedy = "give the container more shared memory (docker run --shm-size=1g): NCCL needs it, gloo does not"
    text = f"{format_bytes(usage.free)} free of {format_bytes(usage.total)} at {path}"
    return make_finding("shared memory", text, Severity.WARNING, usage.free < LOW_SHARED_MEMORY_BYTES, remedy)


def inspect_loopback() -> Finding:
    """Check that a connection to 127.0.0.1 can be opened, because ranks connect over the loopback interface."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
            names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
            return ok_finding("loopback interface", f"{', '.join(names) or 'unnamed'}, 127.0.0.1 answers")
    except OSError as error:
        remedy = "enable the interface: ip link set lo up; in a sandbox, allow connections to 127.0.0.1"
        return Finding("loopback interface", Severity.PROBLEM, f"127.0.0.1 does not answer: {error}", remedy)


def inspect_backends() -> Iterator[Finding]:
    """Inspect whether this build of torch includes torch.distributed, gloo and NCCL."""
    if not dist.is_available():
        yield Finding(
            "torch.distributed",
            Severity.PROBLEM,
            "not built into this torch",
            "install a build of torch that includes it",
        )
        return
    gloo = dist.is_gloo_available()
    remedy = "ranks on CPU need it: install torch from PyPI or download.pytorch.org"
    yield make_finding("gloo", "available" if gloo else "not available", Severity.PROBLEM, not gloo, remedy)
    yield ok_finding("nccl", "available" if dist.is_nccl_available() else "not available, so ranks cannot use GPUs")


def inspect_devices() -> Finding:
    """Compare ``ZHARNESS_DEVICE`` with the number of GPUs. Does not initialize CUDA, so ranks can still be forked."""
    count, device = torch.cuda.device_count(), compute_device_type()
    text = f"cpu, {count} GPUs; ranks use {device} (ZHARNESS_DEVICE)"
    remedy = "unset ZHARNESS_DEVICE, or make GPUs visible to this process (CUDA_VISIBLE_DEVICES)"
    return make_finding("devices", text, Severity.PROBLEM, device == "cuda" and count == 0, remedy)


def inspect_gpus(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """Yield a finding on each GPU that nvidia-smi lists, and on whether CUDA's multi-process service runs."""
    for gpu in gpus:
        text = (
            f"{gpu.name}, driver {gpu.driver}, compute mode {gpu.compute_mode}, {gpu.free_mib} of {gpu.total_mib} MiB "
            f"free: room for about {gpu.largest_context_count} processes (a cell has one for each rank and one judge)"
        )
        remedy = "ranks cannot share it: set it back with 'nvidia-smi -c DEFAULT'"
        yield make_finding(f"GPU {gpu.index}", text, Severity.PROBLEM, not gpu.is_shared, remedy)
    if gpus:
        running = is_mps_running()
        text = "running: an illegal access in one rank ends every rank on the GPU" if running else "not running"
        remedy = "stop it ('echo quit | nvidia-cuda-mps-control'), so that a cell that breaks leaves the others alone"
        yield make_finding("CUDA's multi-process service", text, Severity.WARNING, running, remedy)


def read_first_free_mib() -> int | None:
    """Return the free memory of the first GPU, in MiB."""
    return next((gpu.free_mib for gpu in read_gpus()), None)


def inspect_context(gpu: Gpu, measured: int | None) -> Finding:
    """Inspect the memory of a CUDA context; warn if ``--jobs`` is planned with less memory for each context."""
    if measured is None:
        return ok_finding("CUDA context", f"not measured; {gpu.context_mib} MiB are planned for each process")
    text = f"{measured} MiB beside a process's tensors; {gpu.context_mib} MiB are planned"
    remedy = f"set {CONTEXT_VARIABLE}={measured}; the number of cells that run at once depends on it"
    return make_finding("CUDA context", text, Severity.WARNING, measured > gpu.context_mib, remedy)


def inspect_release_cache(folder: Path) -> Finding:
    """Inspect the cache of engine releases: its size, the free disk space, and whether this user can write to it."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    used = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
    text = f"{folder}, {format_bytes(used)}, {format_bytes(shutil.disk_usage(existing).free)} free"
    remedy = "set ZHARNESS_CACHE to a writable folder; only engine releases that are not installed need it"
    return make_finding("cache of releases", text, Severity.WARNING, not os.access(existing, os.W_OK), remedy)
