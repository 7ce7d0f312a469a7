"""Find the frame of a traceback that a reader can change: the innermost one of the user's or the engine's code."""

from __future__ import annotations

import importlib.util
import sysconfig
import traceback
from collections.abc import Sequence
from functools import cache
from pathlib import Path

# Packages of zharness whose frames belong to an engine or an example, not to the harness.
_ENGINE_PACKAGES = ("reference", "mutants")
_PACKAGE = Path(__file__).parent
_STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
_INSTALLED = ("site-packages", "dist-packages")


def describe_raising_frame(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return file, line and function of the innermost frame that is not torch's, Python's or the harness's.

    Returns the innermost frame if there is no other one, and an empty string without frames.
    """
    if not frames:
        return ""
    chosen = next((frame for frame in reversed(frames) if is_users_or_engines(Path(frame.filename))), frames[-1])
    return f"{shorten_path(Path(chosen.filename))}, line {chosen.lineno}, in {chosen.name}"


def describe_exception(error: BaseException) -> str:
    """Return type and message of ``error``, and the frame of the user's code, or else of torch's, that raised it."""
    files = [(frame, Path(frame.filename)) for frame in traceback.extract_tb(error.__traceback__)]
    known = [frame for frame, file in files if is_users_or_engines(file) or file.is_relative_to(find_torch())]
    place = f" (raised by {describe_raising_frame(known)})" if known else ""
    return f"{type(error).__name__}: {error}{place}"


def is_users_or_engines(file: Path) -> bool:
    """Return whether ``file`` belongs to neither torch, Python's standard library nor the harness."""
    if file.is_relative_to(_PACKAGE):
        return file.relative_to(_PACKAGE).parts[0] in _ENGINE_PACKAGES
    if file.is_relative_to(find_torch()) or not file.is_absolute():
        return False
    return not file.is_relative_to(_STANDARD_LIBRARY) or any(part in _INSTALLED for part in file.parts)


@cache
def find_torch() -> Path:
    """Return the folder of torch, which is not imported for it: `zharness list` runs without torch."""
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else Path("torch")


def shorten_path(file: Path) -> str:
    """Return ``file`` from its package on if it is installed, or relative to the current directory if it lies there."""
    for folder in _INSTALLED:
        if folder in file.parts:
            return str(Path(*file.parts[file.parts.index(folder) + 1 :]))
    return str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else str(file)
