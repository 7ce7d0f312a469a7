"""Compute the largest world size that this machine can start, from its memory and its resource limits."""

from __future__ import annotations

import ctypes
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zharness.errors import UsageError

# A rank of a small model used 18 MiB of private memory (Private_Dirty in /proc/PID/smaps_rollup); the rest is reserve.
RANK_BYTES = 64 * 2**20
LARGEST_TESTED_WORLD = 256  # the largest world size tested on one machine
CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")
# mallopt(3): allocations up to this size come from the heap (the largest value that glibc accepts), and the heap keeps
# this much free memory.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
HEAP_ALLOCATION_BYTES, KEPT_HEAP_BYTES = 32 * 2**20, 128 * 2**20


def available_memory() -> int:
    """Return the smaller of the machine's free memory and the memory that the cgroup still allows, in bytes."""
    left = cgroup_memory_left()
    return free_memory() if left is None else min(free_memory(), left)


def free_memory() -> int:
    """Return the machine's free memory in bytes, including caches that the kernel can reclaim."""
    table = Path("/proc/meminfo")
    if table.exists():
        match = re.search(r"^MemAvailable:\s+(\d+) kB$", table.read_text(), re.MULTILINE)
        if match is not None:
            return int(match[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def keep_freed_memory() -> None:
    """Make glibc's malloc reuse freed memory in this process, instead of asking the system for new pages each time.

    By default, malloc maps new pages for each allocation above a threshold of 128 KiB to 32 MiB, and the system fills
    the pages with zeros each time: a copy of a model with 10 M parameters then takes 28 ms instead of 10 ms.
    """
    with suppress(AttributeError, OSError):  # another C library has no mallopt, and maps pages as before
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, HEAP_ALLOCATION_BYTES)
        library.mallopt(M_TRIM_THRESHOLD, KEPT_HEAP_BYTES)


def is_in_memory(folder: Path, mounts: Path = Path("/proc/mounts")) -> bool:
    """Return whether files in ``folder`` take memory, because its file system is a tmpfs or ramfs."""
    kinds = {Path(fields[1]): fields[2] for fields in map(str.split, read_lines(mounts)) if len(fields) > 2}
    resolved = folder.resolve()
    mounted = next((path for path in (resolved, *resolved.parents) if path in kinds), None)
    return mounted is not None and kinds[mounted] in ("tmpfs", "ramfs")


def cgroup_memory_left(root: Path = CGROUP_ROOT, membership: Path = CGROUP_MEMBERSHIP) -> int | None:
    """Return the memory in bytes that the cgroups of this process still allow, or None without a limit.

    ``root`` is the folder of the mounted cgroups (version 1 or 2). The file ``membership`` names the cgroup of this
    process. The limits of this cgroup and of all cgroups above it apply. Cached files count as free memory, because the
    kernel can reclaim them.
    """
    folders = {folder for line in read_lines(membership) for folder in list_cgroup_folders(root, line)}
    left = [memory_left_in(folder) for folder in folders | {root, root / "memory"}]
    return min((size for size in left if size is not None), default=None)


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file, or an empty list if the file does not exist."""
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def list_cgroup_folders(root: Path, line: str) -> list[Path]:
    """Return the folders of the memory cgroup in ``line`` of /proc/self/cgroup and of the cgroups above it.

    A line is ``number:controllers:path``; version 2 has no controllers.
    """
    _, controllers, path = line.split(":", 2)
    if controllers and "memory" not in controllers.split(","):
        return []
    top = root / "memory" if controllers else root
    own = top / path.strip("/")
    return [own, *(folder for folder in own.parents if folder.is_relative_to(top))]


def memory_left_in(folder: Path) -> int | None:
    """Return the memory in bytes that the cgroup in ``folder`` still allows, or None if it has no limit."""
    for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        if (folder / limit).exists() and (folder / used).exists():
            text = (folder / limit).read_text().strip()
            # Version 1 writes "no limit" as a number larger than any memory.
            if text == "max" or int(text) > 2**60:
                return None
            return max(0, int(text) - int((folder / used).read_text()) + cached_file_bytes(folder / "memory.stat"))
    return None


def process_memory_left() -> int | None:
    """Return the memory in bytes that one process may still allocate under ulimit -d and ulimit -v, or None.

    Ranks inherit both limits.
    """
    pages = Path("/proc/self/statm")
    if not pages.exists():
        return None
    counts = [int(text) * os.sysconf("SC_PAGE_SIZE") for text in pages.read_text().split()]
    used = {resource.RLIMIT_AS: counts[0], resource.RLIMIT_DATA: counts[5]}
    limits = {kind: resource.getrlimit(kind)[0] for kind in used}
    left = [max(0, limit - used[kind]) for kind, limit in limits.items() if limit != resource.RLIM_INFINITY]
    return min(left, default=None)


@contextmanager
def limit_process_memory(more_bytes: int) -> Iterator[None]:
    """In the block, let this process allocate at most ``more_bytes`` more; beyond that, torch raises RuntimeError."""
    pages = Path("/proc/self/statm")
    if not pages.exists():
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(pages.read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    limits = [size for size in (before[0], before[1], used + more_bytes) if size != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def cached_file_bytes(stat_file: Path) -> int:
    """Return the number of bytes of cached files in a cgroup's memory, from the cgroup's ``memory.stat`` file.

    A cgroup counts cached files as used memory, although the kernel reclaims them when memory runs short. In version 1
    this function returns the total over the child cgroups too, because the usage in version 1 includes them.
    """
    if not stat_file.exists():
        return 0
    stats: dict[str, str] = dict(re.findall(r"^(\w+) (\d+)$", stat_file.read_text(), re.MULTILINE))
    return sum(int(stats.get(f"total_{kind}", stats.get(kind, "0"))) for kind in ("active_file", "inactive_file"))


def largest_world_size() -> tuple[int, str]:
    """Return the largest world size that this machine can start, and the name of the limit that determines it."""
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)  # the hard limit: a rank server raises its own to it
    limits = {
        "the largest world size tested on one machine": LARGEST_TESTED_WORLD,
        "free memory": available_memory() // RANK_BYTES,
    }
    if processes != resource.RLIM_INFINITY:
        limits["the limit on processes, ulimit -u"] = processes // 2
    if files != resource.RLIM_INFINITY:
        limits["the limit on open files, ulimit -n"] = (files - 64) // 6
    reason = min(limits, key=lambda name: limits[name])
    return max(1, limits[reason]), reason


def check_world_size(world_size: int) -> None:
    """Raise UsageError unless this machine can start a group of ``world_size`` ranks."""
    largest, reason = largest_world_size()
    if not 1 <= world_size <= largest:
        raise UsageError(
            f"world size {world_size} cannot be started here; allowed: 1 to {largest} ({reason}); "
            "request fewer ranks or raise that limit"
        )


def raise_file_limit() -> None:
    """Raise this process's soft limit on open files to the hard limit: a rank server opens four files per rank."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
