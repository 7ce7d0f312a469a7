"""What a piece of work leaves behind in its rank: threads, processes, and changes to what the whole process shares."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist

_SIGNALS = (signal.SIGALRM, signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# Helpers of the standard library that it starts on its own and ends with the process.
_STDLIB_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def find_leftovers() -> dict[str, str]:
    """The threads that would keep this process alive and the processes that would outlive it, each in words.

    The keys stay the same from one call to the next, so that two calls can be compared.
    """
    return {**dict(iter_leftover_threads()), **dict(iter_leftover_processes())}


def iter_leftover_threads() -> Iterator[tuple[str, str]]:
    """Non-daemon threads other than the main one, with the place where each stands."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread is threading.main_thread() or thread.daemon or thread.ident not in frames:
            continue
        summary = traceback.extract_stack(frames[thread.ident])
        last = next((frame for frame in reversed(summary) if "/lib/python" not in frame.filename), summary[-1])
        words = f"thread {thread.name!r}, in {last.name} ({Path(last.filename).name}, line {last.lineno})"
        yield f"thread {thread.ident}", words


def iter_leftover_processes() -> Iterator[tuple[str, str]]:
    """Living child processes, with their command lines. Linux only; none where there is no memory left to look."""
    for pid, words in find_living_children().items():
        yield f"process {pid}", f"process {pid}, {words[:100]}"


def find_living_children() -> dict[int, str]:
    """Child processes that live, and what they run; without the helpers of the standard library."""
    found = {int(pid): read_command_line(pid) for pid in list_child_pids()}
    return {
        pid: words for pid, words in found.items() if words and not any(helper in words for helper in _STDLIB_HELPERS)
    }


def list_child_pids() -> list[str]:
    """The children of every thread of this process."""
    pids: list[str] = []
    with suppress(OSError):
        for listed in Path("/proc/self/task").glob("*/children"):
            with suppress(OSError):  # the thread ended meanwhile
                pids += listed.read_text().split()
    return pids


def read_command_line(pid: str) -> str:
    """What a process runs; the empty string for one that has ended, or that only waits to be waited for."""
    process = Path("/proc") / pid
    try:
        name, _, rest = process.joinpath("stat").read_text().partition("(")[2].rpartition(")")
        words = process.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
    # Just after its exec a process has no command line yet, so that alone does not tell a zombie.
    return "" if rest.split()[0] in ("Z", "X") else words or name


@dataclass(frozen=True)
class ProcessFingerprint:
    """The state of a process that its next piece of work would see."""

    environment: dict[str, str]
    directory: str
    search_path: tuple[str, ...]
    default_dtype: torch.dtype
    torch_threads: int
    gradient_mode: bool
    deterministic: bool
    default_device: str
    default_group: int
    signal_handlers: tuple[object, ...]
    daemon_threads: tuple[str, ...]

    def list_changes(self, other: ProcessFingerprint) -> list[str]:
        """The names of what differs."""
        names = [field.name for field in fields(self) if getattr(self, field.name) != getattr(other, field.name)]
        return [name.replace("_", " ") for name in names]


def take_fingerprint() -> ProcessFingerprint:
    """This process's state now."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return ProcessFingerprint(
        environment=environment,
        directory=working_directory(),
        search_path=tuple(sys.path),
        default_dtype=torch.get_default_dtype(),
        torch_threads=torch.get_num_threads(),
        gradient_mode=torch.is_grad_enabled(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        default_device=str(torch.get_default_device()),
        default_group=id(dist.group.WORLD) if dist.is_initialized() else 0,
        signal_handlers=tuple(signal.getsignal(number) for number in _SIGNALS),
        daemon_threads=tuple(sorted(thread.name for thread in threading.enumerate() if thread.daemon)),
    )


def working_directory() -> str:
    """The working directory, which a test may have removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "(removed)"
