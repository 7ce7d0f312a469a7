"""What the machine gives: cores, memory, limits, devices, the loopback interface, room on disks."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from zharness.doctor.finding import Finding, Severity, format_bytes, make_finding, ok_finding
from zharness.world.limits import CGROUP_ROOT, RANK_BYTES, cgroup_memory_left, free_memory, largest_world_size

GIB = 2**30
LOW_MEMORY_BYTES = 2 * GIB  # the server, a judge and two ranks of the real DeepSpeed, each with its modules imported
LOW_RESOURCE_LIMIT = 256
LOW_DISK_BYTES = GIB
LOW_SHARED_MEMORY_BYTES = 64 * 2**20  # what a container has where nobody asked for more


def inspect_machine(cache_dir: Path) -> Iterator[Finding]:
    """Every finding on the machine; ``cache`` is where releases of engines are kept."""
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
    yield inspect_release_cache(cache_dir)


def inspect_cores() -> Finding:
    """Those that this process may use, and what its control group allows of their time."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = parse_cpu_quota((CGROUP_ROOT / "cpu.max").read_text() if (CGROUP_ROOT / "cpu.max").exists() else "max")
    allowed = usable if quota is None else min(usable, quota)
    words = f"{usable} usable of {os.cpu_count()}" + ("" if quota is None else f", {quota:g} allowed by the cgroup")
    remedy = "two ranks share one core, so deadlines come sooner: allow more, or pass a longer --timeout"
    return make_finding("cores", words, Severity.WARNING, allowed < 2, remedy)


def parse_cpu_quota(text: str) -> float | None:
    """Cores that a ``cpu.max`` of the cgroup allows (``QUOTA PERIOD`` in microseconds); None for no limit."""
    quota, *period = text.split()
    return None if quota == "max" or not period else int(quota) / int(period[0])


def inspect_memory() -> Finding:
    """What new processes can have: free memory, and what the control group leaves of its own limit."""
    free, limit = free_memory(), cgroup_memory_left()
    words = f"{format_bytes(free)} free" + ("" if limit is None else f", {format_bytes(limit)} left by the cgroup")
    least = free if limit is None else min(free, limit)
    remedy = "end other programs or raise the limit; --jobs 1 runs one cell at a time"
    state = Severity.PROBLEM if least < 4 * RANK_BYTES else Severity.WARNING
    return make_finding("memory", words, state, least < LOW_MEMORY_BYTES, remedy)


def inspect_largest_world_size() -> Finding:
    """The largest world size."""
    most, reason = largest_world_size()
    remedy = f"raise {reason}"
    return make_finding("largest world size", f"{most} ({reason})", Severity.PROBLEM, most < 2, remedy)


def inspect_open_files() -> Finding:
    """File descriptors: a rank server raises its own limit to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = hard != resource.RLIM_INFINITY and hard < LOW_RESOURCE_LIMIT
    return make_finding(
        "open files",
        f"{format_limit(soft)}, at most {format_limit(hard)}",
        Severity.WARNING,
        few,
        "raise it: ulimit -Hn 4096",
    )


def inspect_processes() -> Finding:
    """Processes of this user."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    few = soft != resource.RLIM_INFINITY and soft < LOW_RESOURCE_LIMIT
    return make_finding("processes", format_limit(soft), Severity.WARNING, few, "raise it: ulimit -u 4096")


def format_limit(value: int) -> str:
    """A resource limit in words."""
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def inspect_temporary_folder(path: Path) -> Finding:
    """Room in the temporary folder, where ranks leave for the judge what they saw."""
    free = shutil.disk_usage(path).free
    remedy = "free some, or set TMPDIR to a folder with more: ranks leave copies of weights and gradients there"
    state = Severity.PROBLEM if free < LOW_SHARED_MEMORY_BYTES else Severity.WARNING
    return make_finding(
        "temporary folder", f"{format_bytes(free)} free at {path}", state, free < LOW_DISK_BYTES, remedy
    )


def inspect_shared_memory(path: Path) -> Finding:
    """Room in shared memory, where NCCL and loaders with workers put their buffers; gloo needs none."""
    if not path.is_dir():
        return Finding(
            "shared memory", Severity.WARNING, f"no {path}", "mount a tmpfs there; gloo does without, NCCL not"
        )
    usage = shutil.disk_usage(path)
    remedy = "give the container more (docker run --shm-size=1g); gloo does without, NCCL not"
    words = f"{format_bytes(usage.free)} free of {format_bytes(usage.total)} at {path}"
    return make_finding("shared memory", words, Severity.WARNING, usage.free < LOW_SHARED_MEMORY_BYTES, remedy)


def inspect_loopback() -> Finding:
    """The interface on which ranks meet, by a connection to ourselves."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
            names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
            return ok_finding("loopback interface", f"{', '.join(names) or 'unnamed'}, 127.0.0.1 answers")
    except OSError as error:
        remedy = "bring it up: ip link set lo up; in a sandbox allow connections to 127.0.0.1"
        return Finding("loopback interface", Severity.PROBLEM, f"127.0.0.1 does not answer: {error}", remedy)


def inspect_backends() -> Iterator[Finding]:
    """torch's collectives."""
    if not dist.is_available():
        yield Finding("torch.distributed", Severity.PROBLEM, "not built into this torch", "install a torch that has it")
        return
    gloo = dist.is_gloo_available()
    remedy = "ranks on CPU need it: install a torch of PyPI or of download.pytorch.org"
    yield make_finding("gloo", "available" if gloo else "not available", Severity.PROBLEM, not gloo, remedy)
    yield ok_finding(
        "nccl", "available" if dist.is_nccl_available() else "not available, so ranks on GPUs need not apply"
    )


def inspect_devices() -> Finding:
    """Accelerators, counted without a context on any: ranks could not be forked from this process after that."""
    count, asked = torch.cuda.device_count(), os.environ.get("ZHARNESS_DEVICE", "cpu")
    words = f"cpu, {count} GPUs; ranks use {asked} (ZHARNESS_DEVICE)"
    remedy = "unset ZHARNESS_DEVICE, or make GPUs visible to this process (CUDA_VISIBLE_DEVICES)"
    return make_finding("devices", words, Severity.PROBLEM, asked == "cuda" and count == 0, remedy)


def inspect_release_cache(folder: Path) -> Finding:
    """The cache of engine releases, and how much it holds."""
    near = next(path for path in (folder, *folder.parents) if path.exists())
    used = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
    words = f"{folder}, {format_bytes(used)}, {format_bytes(shutil.disk_usage(near).free)} free"
    remedy = "set ZHARNESS_CACHE to a folder that can be written; only releases that are not installed need it"
    return make_finding("cache of releases", words, Severity.WARNING, not os.access(near, os.W_OK), remedy)
