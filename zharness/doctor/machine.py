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

from zharness.doctor.finding import Finding, State, fine, judged, size
from zharness.world.limits import CGROUP, RANK_BYTES, free_memory, largest_world, memory_left

GIB = 2**30
LITTLE_MEMORY = 2 * GIB  # the server, a judge and two ranks of the real DeepSpeed, each with its modules imported
FEW_FILES = 256
LITTLE_ROOM = GIB
LITTLE_SHARED = 64 * 2**20  # what a container has where nobody asked for more


def machine(cache: Path) -> Iterator[Finding]:
    """Every finding on the machine; ``cache`` is where releases of engines are kept."""
    yield cores()
    yield memory()
    yield largest()
    yield open_files()
    yield processes()
    yield temporary(Path(tempfile.gettempdir()))
    yield shared_memory(Path("/dev/shm"))  # noqa: S108 - the name of a mount, nothing is written there
    yield loopback()
    yield from backends()
    yield devices()
    yield kept_releases(cache)


def cores() -> Finding:
    """Those that this process may use, and what its control group allows of their time."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota((CGROUP / "cpu.max").read_text() if (CGROUP / "cpu.max").exists() else "max")
    allowed = usable if quota is None else min(usable, quota)
    words = f"{usable} usable of {os.cpu_count()}" + ("" if quota is None else f", {quota:g} allowed by the cgroup")
    remedy = "two ranks share one core, so deadlines come sooner: allow more, or pass a longer --timeout"
    return judged("cores", words, State.WARNING, allowed < 2, remedy)


def cpu_quota(text: str) -> float | None:
    """Cores that a ``cpu.max`` of the cgroup allows (``QUOTA PERIOD`` in microseconds); None for no limit."""
    quota, *period = text.split()
    return None if quota == "max" or not period else int(quota) / int(period[0])


def memory() -> Finding:
    """What new processes can have: free memory, and what the control group leaves of its own limit."""
    free, limit = free_memory(), memory_left()
    words = f"{size(free)} free" + ("" if limit is None else f", {size(limit)} left by the cgroup")
    least = free if limit is None else min(free, limit)
    remedy = "end other programs or raise the limit; --jobs 1 runs one cell at a time"
    state = State.PROBLEM if least < 4 * RANK_BYTES else State.WARNING
    return judged("memory", words, state, least < LITTLE_MEMORY, remedy)


def largest() -> Finding:
    """The largest world size."""
    most, reason = largest_world()
    remedy = f"raise {reason}"
    return judged("largest world size", f"{most} ({reason})", State.PROBLEM, most < 2, remedy)


def open_files() -> Finding:
    """File descriptors: a rank server raises its own limit to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = hard != resource.RLIM_INFINITY and hard < FEW_FILES
    return judged(
        "open files", f"{limit(soft)}, at most {limit(hard)}", State.WARNING, few, "raise it: ulimit -Hn 4096"
    )


def processes() -> Finding:
    """Processes of this user."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    few = soft != resource.RLIM_INFINITY and soft < FEW_FILES
    return judged("processes", limit(soft), State.WARNING, few, "raise it: ulimit -u 4096")


def limit(value: int) -> str:
    """A resource limit in words."""
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def temporary(path: Path) -> Finding:
    """Room in the temporary folder, where ranks leave for the judge what they saw."""
    free = shutil.disk_usage(path).free
    remedy = "free some, or set TMPDIR to a folder with more: ranks leave copies of weights and gradients there"
    state = State.PROBLEM if free < LITTLE_SHARED else State.WARNING
    return judged("temporary folder", f"{size(free)} free at {path}", state, free < LITTLE_ROOM, remedy)


def shared_memory(path: Path) -> Finding:
    """Room in shared memory, where NCCL and loaders with workers put their buffers; gloo needs none."""
    if not path.is_dir():
        return Finding("shared memory", State.WARNING, f"no {path}", "mount a tmpfs there; gloo does without, NCCL not")
    usage = shutil.disk_usage(path)
    remedy = "give the container more (docker run --shm-size=1g); gloo does without, NCCL not"
    words = f"{size(usage.free)} free of {size(usage.total)} at {path}"
    return judged("shared memory", words, State.WARNING, usage.free < LITTLE_SHARED, remedy)


def loopback() -> Finding:
    """The interface on which ranks meet, by a connection to ourselves."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
            names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
            return fine("loopback interface", f"{', '.join(names) or 'unnamed'}, 127.0.0.1 answers")
    except OSError as error:
        remedy = "bring it up: ip link set lo up; in a sandbox allow connections to 127.0.0.1"
        return Finding("loopback interface", State.PROBLEM, f"127.0.0.1 does not answer: {error}", remedy)


def backends() -> Iterator[Finding]:
    """torch's collectives."""
    if not dist.is_available():
        yield Finding("torch.distributed", State.PROBLEM, "not built into this torch", "install a torch that has it")
        return
    gloo = dist.is_gloo_available()
    remedy = "ranks on CPU need it: install a torch of PyPI or of download.pytorch.org"
    yield judged("gloo", "available" if gloo else "not available", State.PROBLEM, not gloo, remedy)
    yield fine("nccl", "available" if dist.is_nccl_available() else "not available, so ranks on GPUs need not apply")


def devices() -> Finding:
    """Accelerators, counted without a context on any: ranks could not be forked from this process after that."""
    count, asked = torch.cuda.device_count(), os.environ.get("ZHARNESS_DEVICE", "cpu")
    words = f"cpu, {count} GPUs; ranks use {asked} (ZHARNESS_DEVICE)"
    remedy = "unset ZHARNESS_DEVICE, or make GPUs visible to this process (CUDA_VISIBLE_DEVICES)"
    return judged("devices", words, State.PROBLEM, asked == "cuda" and count == 0, remedy)


def kept_releases(folder: Path) -> Finding:
    """The cache of engine releases, and how much it holds."""
    near = next(path for path in (folder, *folder.parents) if path.exists())
    used = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
    words = f"{folder}, {size(used)}, {size(shutil.disk_usage(near).free)} free"
    remedy = "set ZHARNESS_CACHE to a folder that can be written; only releases that are not installed need it"
    return judged("cache of releases", words, State.WARNING, not os.access(near, os.W_OK), remedy)
