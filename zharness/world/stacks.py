"""Parse the stacks that faulthandler writes for a rank, and remove this harness's own frames from them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FRAME = re.compile(r'^  File "(?P<file>.*?)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread|Thread) ", re.MULTILINE)
# Frames of the harness and of pytest that call a test or a function: they are the same in every stack.
_HARNESS_PATHS = ("/_pytest/", "/pluggy/", "/zharness/world/", "/zharness/pytest_ranks/", "/multiprocessing/")
_COLLECTIVES_FILE = "/torch/distributed/distributed_c10d.py"
_LOGGER_FILE = "/torch/distributed/c10d_logger.py"
_COMM_FILE = "/zharness/comm.py"
RANK_FILE = "/zharness/world/rank.py"
_CHANNEL_METHODS = ("receive", "send", "exchange", "note", "announce")  # of that file: the test is their caller
_EXCHANGE_FRAME = " in exchange_as\n"  # of zharness/world/current_rank.py
# Code that compiles an engine's operators or imports a module: a rank that runs this code is not hung yet.
_BUILD_PATHS = ("/torch/utils/cpp_extension.py", "/op_builder/", "<frozen importlib._bootstrap>")


@dataclass(frozen=True)
class StackFrame:
    """One frame of a stack: the file, the line number and the name of the function."""

    file: str
    line: int
    name: str

    @property
    def location(self) -> str:
        """Return the file name without its folder, and the line, as in ``test_x.py, line 7``."""
        return f"{Path(self.file).name}, line {self.line}"


def parse_frames(text: str) -> tuple[StackFrame, ...]:
    """Return all frames of a dump, of every thread, including frames of the harness."""
    return tuple(StackFrame(match["file"], int(match["line"]), match["name"]) for match in _FRAME.finditer(text))


def parse_main_thread(text: str) -> tuple[StackFrame, ...]:
    """Return the frames of the thread that received the signal, innermost first.

    This thread is the main thread, unless the main thread blocks signals. Frames of the harness and of pytest are left
    out, and so are the frames that called the rank's function.
    """
    threads = _THREAD.split(text)
    current = text.find("Current thread ")
    stack = text[current:] if current >= 0 else (threads[-1] if threads else "")
    frames = parse_frames(stack)
    is_runner = [frame.file.endswith(RANK_FILE) and frame.name not in _CHANNEL_METHODS for frame in frames]
    outer = is_runner.index(True) if True in is_runner else len(frames)
    return tuple(frame for frame in frames[:outer] if not any(part in frame.file for part in _HARNESS_PATHS))


def find_waiting_collective(frames: tuple[StackFrame, ...]) -> str:
    """Return the collective in which a rank waits, with the file and line of the call, or the empty string if none."""
    for at, frame in enumerate(frames):
        if not frame.file.endswith(_COLLECTIVES_FILE):
            continue
        call, caller = frame, None
        for outer in frames[at + 1 :]:
            if outer.file.endswith((_COLLECTIVES_FILE, _LOGGER_FILE, _COMM_FILE)):
                call = call if outer.file.endswith(_LOGGER_FILE) else outer
            else:
                caller = outer
                break
        return f"{call.name} ({caller.location})" if caller is not None else call.name
    return ""


def find_waiting_site(text: str) -> str:
    """Return the collective or the exchange of values in which a rank waits, as text; empty if it waits in neither."""
    frames = parse_main_thread(text)
    collective = find_waiting_collective(frames)
    if collective or _EXCHANGE_FRAME not in text[max(text.find("Current thread "), 0) :]:
        return collective
    return "an exchange with the other ranks" + (f" ({frames[0].location})" if frames else "")


def describe_innermost_frame(frames: tuple[StackFrame, ...]) -> str:
    """Describe the innermost frame and, if that is in the standard library, the innermost frame outside of it."""
    if not frames:
        return ""
    inner = frames[0]
    outer = next((frame for frame in frames if "/lib/python" not in frame.file and frame.file[:1] != "<"), inner)
    tail = f", called in {outer.name} ({outer.location})" if outer is not inner else ""
    return f"{inner.name} ({inner.location}){tail}"


def is_building(frames: tuple[StackFrame, ...]) -> bool:
    """Return whether ``frames`` show a rank that compiles an engine's operators or imports a module."""
    return any(part in frame.file for frame in frames for part in _BUILD_PATHS)


_CHANNEL_ENDS = tuple(f" in {name}" for name in _CHANNEL_METHODS)


def strip_harness_frames(text: str) -> str:
    """Remove from stacks the frames of the harness and of pytest, and faulthandler's list of extension modules."""
    lines = []
    is_runner = False
    for line in text.splitlines():
        if not line.startswith('  File "'):
            is_runner = False
        is_runner = is_runner or (RANK_FILE in line and not line.endswith(_CHANNEL_ENDS))
        if (
            not is_runner
            and not any(part in line for part in _HARNESS_PATHS)
            and not line.startswith("Extension modules: ")
        ):
            lines.append(line)
    return "\n".join(lines).strip("\n")


# Files that run a task in a launched rank: the frames that called them are the same in every stack.
_TASK_RUNNER_FILES = (
    "/zharness/pytest_ranks/rank_protocol.py",
    "/zharness/world/launched_rank.py",
    "/zharness/world/leader.py",
)


def trim_stacks(text: str) -> str:
    """Remove from a rank's stacks the frames that ran its task, and the idle threads of the harness.

    The function is for ranks that torchrun started.
    """
    blocks: list[list[str]] = [[]]
    is_runner = False
    for line in text.splitlines():
        if not line.startswith("  "):
            blocks.append([])
            is_runner = False
        is_runner = is_runner or any(part in line for part in _TASK_RUNNER_FILES)
        if not is_runner:
            blocks[-1].append(line)
    return "\n".join(line for block in blocks if not is_idle_thread(block) for line in block)


def is_idle_thread(block: list[str]) -> bool:
    """Return whether the lines ``block`` are the stack of a harness thread that waits for work."""
    frames = [line for line in block if line.startswith('  File "')]
    is_thread = bool(block) and is_thread_header(block[0])
    return is_thread and all("/threading.py" in frame or "/zharness/world/store.py" in frame for frame in frames)


def is_thread_header(line: str) -> bool:
    """Return whether ``line`` is the header that faulthandler writes before the stack of a thread."""
    return line.startswith(("Thread ", "Current thread "))
