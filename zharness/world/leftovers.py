"""Find the threads and processes that a task left running in its rank, and the process-wide state that it changed."""

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
# Helper processes that the standard library starts by itself and ends with the process.
_STDLIB_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def find_leftovers() -> dict[str, str]:
    """Return descriptions of this process's living children and of its non-daemon threads other than the main thread.

    A thread or process has the same key (``thread 1234``, ``process 1234``) in every call, so that the results of two
    calls can be compared.
    """
    return {**dict(iter_leftover_threads()), **dict(iter_leftover_processes())}


def iter_leftover_threads() -> Iterator[tuple[str, str]]:
    """Yield a key and a description for every non-daemon thread except the main thread.

    The description contains the name of the thread and the line that the thread is executing.
    """
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread is threading.main_thread() or thread.daemon or thread.ident not in frames:
            continue
        summary = traceback.extract_stack(frames[thread.ident])
        last = next((frame for frame in reversed(summary) if "/lib/python" not in frame.filename), summary[-1])
        description = f"thread {thread.name!r}, in {last.name} ({Path(last.filename).name}, line {last.lineno})"
        yield f"thread {thread.ident}", description


def iter_leftover_processes() -> Iterator[tuple[str, str]]:
    """Yield a key and a description (process id, command line) for every living child process. Works on Linux only."""
    for pid, command_line in find_living_children().items():
        yield f"process {pid}", f"process {pid}, {command_line[:100]}"


def find_living_children() -> dict[int, str]:
    """Return the command lines of the living child processes, by process id.

    Helper processes of Python's standard library are left out.
    """
    command_lines = {int(pid): read_command_line(pid) for pid in list_child_pids()}
    return {
        pid: command_line
        for pid, command_line in command_lines.items()
        if command_line and not any(helper in command_line for helper in _STDLIB_HELPERS)
    }


def list_child_pids() -> list[str]:
    """Return the process ids of the children of all threads of this process, including children that have ended."""
    pids: list[str] = []
    with suppress(OSError):
        for children_file in Path("/proc/self/task").glob("*/children"):
            with suppress(OSError):  # the thread ended meanwhile
                pids += children_file.read_text().split()
    return pids


def read_command_line(pid: str) -> str:
    """Return the command line of a process; the empty string if the process has ended or is a zombie."""
    process = Path("/proc") / pid
    try:
        name, _, rest = process.joinpath("stat").read_text().partition("(")[2].rpartition(")")
        command_line = process.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
    # A zombie has no command line, but a process just after its exec has none either; so the state decides.
    return "" if rest.split()[0] in ("Z", "X") else command_line or name


@dataclass(frozen=True)
class ProcessFingerprint:
    """The process-wide state that a task can change and that the next task in this process would find."""

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
        """Return the names of the fields in which ``self`` and ``other`` differ, with spaces for underscores."""
        names = [field.name for field in fields(self) if getattr(self, field.name) != getattr(other, field.name)]
        return [name.replace("_", " ") for name in names]


def take_fingerprint() -> ProcessFingerprint:
    """Return a fingerprint of the current process-wide state of this process."""
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
    """Return the working directory, or ``(removed)`` if a test has removed the working directory."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "(removed)"
