"""Compute the largest world size that this machine can start, from its memory and its resource limits."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

from zharness.errors import UsageError

# A rank of a small model used 18 MiB of private memory (Private_Dirty in /proc/PID/smaps_rollup); the rest is reserve.
RANK_BYTES = 64 * 2**20
LARGEST_TESTED_WORLD = 256  # the largest world size tested on one machine
CGROUP_ROOT = Path("/sys/fs/cgroup")


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


def cgroup_memory_left(cgroup: Path = CGROUP_ROOT) -> int | None:
    """Return the memory in bytes that this process's cgroup (version 1 or 2) still allows, or None without a limit.

    Cached files count as free memory, because the kernel can reclaim them.
    """
    version_1 = cgroup / "memory"
    for limit, used, stat in (
        (cgroup / "memory.max", cgroup / "memory.current", cgroup / "memory.stat"),
        (version_1 / "memory.limit_in_bytes", version_1 / "memory.usage_in_bytes", version_1 / "memory.stat"),
    ):
        if limit.exists() and used.exists():
            text = limit.read_text().strip()
            # Version 1 writes "no limit" as a number larger than any memory.
            is_unlimited = text == "max" or int(text) > 2**60
            return None if is_unlimited else max(0, int(text) - int(used.read_text()) + cached_file_bytes(stat))
    return None


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
