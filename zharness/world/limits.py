"""How many ranks this machine can start."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

from zharness.errors import UsageError

# A rank of a small model had 18 MiB to itself (Private_Dirty in /proc/PID/smaps_rollup); the rest is reserve.
RANK_BYTES = 64 * 2**20
LARGEST_TESTED_WORLD = 256  # the largest world that was tried on one machine
CGROUP_ROOT = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes of memory that new processes can have: what the machine has free, or what the control group leaves."""
    left = cgroup_memory_left()
    return free_memory() if left is None else min(free_memory(), left)


def free_memory() -> int:
    """Bytes that the machine has free, caches that the kernel would give up for new processes included."""
    table = Path("/proc/meminfo")
    if table.exists():
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", table.read_text(), re.MULTILINE)
        if found is not None:
            return int(found[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def cgroup_memory_left(cgroup: Path = CGROUP_ROOT) -> int | None:
    """Bytes that the control group (version 2, or 1) still allows, its caches included; None where it sets no limit."""
    old = cgroup / "memory"
    for limit, used, kinds in (
        (cgroup / "memory.max", cgroup / "memory.current", cgroup / "memory.stat"),
        (old / "memory.limit_in_bytes", old / "memory.usage_in_bytes", old / "memory.stat"),
    ):
        if limit.exists() and used.exists():
            text = limit.read_text().strip()
            # Version 1 writes "no limit" as a number larger than any memory.
            unlimited = text == "max" or int(text) > 2**60
            return None if unlimited else max(0, int(text) - int(used.read_text()) + cached_file_bytes(kinds))
    return None


def cached_file_bytes(stat_file: Path) -> int:
    """Bytes of files that a control group's memory holds: they count as used, and are given up before anything fails.

    Of version 1 those of the groups below it are counted too, as in its usage.
    """
    if not stat_file.exists():
        return 0
    found: dict[str, str] = dict(re.findall(r"^(\w+) (\d+)$", stat_file.read_text(), re.MULTILINE))
    return sum(int(found.get(f"total_{kind}", found.get(kind, "0"))) for kind in ("active_file", "inactive_file"))


def largest_world_size() -> tuple[int, str]:
    """The largest world size that can be started here, and what limits it."""
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)  # a server raises its limit to the hard one
    limits = {
        "the largest world that was tried on one machine": LARGEST_TESTED_WORLD,
        "free memory": available_memory() // RANK_BYTES,
    }
    if processes != resource.RLIM_INFINITY:
        limits["the limit on processes, ulimit -u"] = processes // 2
    if files != resource.RLIM_INFINITY:
        limits["the limit on open files, ulimit -n"] = (files - 64) // 6
    reason = min(limits, key=lambda name: limits[name])
    return max(1, limits[reason]), reason


def check_world_size(world_size: int) -> None:
    """Raises UsageError unless a group of ``world_size`` ranks can be started on this machine."""
    largest, reason = largest_world_size()
    if not 1 <= world_size <= largest:
        raise UsageError(
            f"world size {world_size} cannot be started here; allowed: 1 to {largest} ({reason}); "
            "ask for fewer ranks or raise that limit"
        )


def raise_file_limit() -> None:
    """Let this process open as many files as it may: a server holds four for every rank."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
