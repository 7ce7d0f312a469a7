"""What a rank's stacks, as faulthandler writes them, say about where it stands."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FRAME = re.compile(r'^  File "(?P<file>.*?)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread|Thread) ", re.MULTILINE)
# Frames of the machinery below a test or a function: they are the same in every stack and say nothing.
_HARNESS_PATHS = ("/_pytest/", "/pluggy/", "/zharness/world/", "/zharness/pytest_ranks/", "/multiprocessing/")
_COLLECTIVES_FILE = "/torch/distributed/distributed_c10d.py"
_LOGGER_FILE = "/torch/distributed/c10d_logger.py"
_COMM_FILE = "/zharness/comm.py"
RANK_FILE = "/zharness/world/rank.py"
# Compiling an engine's operators, and what an import runs: both take as long as they take.
_BUILD_PATHS = ("/torch/utils/cpp_extension.py", "/op_builder/", "<frozen importlib._bootstrap>")


@dataclass(frozen=True)
class StackFrame:
    """One line of a stack, innermost first."""

    file: str
    line: int
    name: str

    @property
    def location(self) -> str:
        """``test_x.py, line 7``."""
        return f"{Path(self.file).name}, line {self.line}"


def parse_main_thread(text: str) -> tuple[StackFrame, ...]:
    """The frames, innermost first, of the thread that took the signal: the main thread wherever it can take one.

    Frames of the machinery that called the rank's function are left out.
    """
    threads = _THREAD.split(text)
    current = text.find("Current thread ")
    part = text[current:] if current >= 0 else (threads[-1] if threads else "")
    found = [StackFrame(match["file"], int(match["line"]), match["name"]) for match in _FRAME.finditer(part)]
    outer = next((at for at, frame in enumerate(found) if frame.file.endswith(RANK_FILE)), len(found))
    return tuple(frame for frame in found[:outer] if not any(part in frame.file for part in _HARNESS_PATHS))


def find_waiting_collective(frames: tuple[StackFrame, ...]) -> str:
    """The collective in which a rank stands and where it was called, or the empty string."""
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


def describe_innermost_frame(frames: tuple[StackFrame, ...]) -> str:
    """The innermost frame in words, with the first frame outside of the standard library behind it."""
    if not frames:
        return ""
    inner = frames[0]
    outer = next((frame for frame in frames if "/lib/python" not in frame.file and frame.file[:1] != "<"), inner)
    tail = f", called in {outer.name} ({outer.location})" if outer is not inner else ""
    return f"{inner.name} ({inner.location}){tail}"


def is_building(frames: tuple[StackFrame, ...]) -> bool:
    """Whether the rank compiles an engine's operators or imports a module for the first time."""
    return any(part in frame.file for frame in frames for part in _BUILD_PATHS)


def strip_harness_frames(text: str) -> str:
    """The stacks without the frames that are the same in every rank: those below the rank's function, and pytest's."""
    kept = []
    below = False
    for line in text.splitlines():
        if not line.startswith('  File "'):
            below = False
        below = below or RANK_FILE in line
        if (
            not below
            and not any(part in line for part in _HARNESS_PATHS)
            and not line.startswith("Extension modules: ")
        ):
            kept.append(line)
    return "\n".join(kept).strip("\n")
