"""Log the files of zharness whose functions run in this process and its forks.

Python imports this module at start when its folder is on PYTHONPATH. Each file is one line of $ZHARNESS_TRACE, written
when the first function of the file is called. Functions that run while a module is imported do not count.
"""

import os
import sys
import threading
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = f"{Path(__file__).parents[3] / 'zharness'}{os.sep}"


def is_importing(frame: FrameType | None) -> bool:
    """Whether a caller of ``frame`` is the body of a module of zharness."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(PACKAGE):
            return not frame.f_code.co_filename.endswith("__main__.py")
        frame = frame.f_back
    return False


def install(path: str) -> None:
    """Log to ``path`` from now on, in all threads, and in forks, which share the file descriptor."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    logged: set[str] = set()

    def log_call(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        # CO_OPTIMIZED is set for functions, and neither for modules nor for the bodies of classes.
        if event != "call" or code.co_filename in logged or not code.co_flags & CO_OPTIMIZED:
            return
        if not code.co_filename.startswith(PACKAGE):
            logged.add(code.co_filename)
        elif not is_importing(frame):
            logged.add(code.co_filename)
            os.write(log, f"{code.co_filename.removeprefix(PACKAGE)}\n".encode())

    threading.setprofile(log_call)
    sys.setprofile(log_call)


if "ZHARNESS_TRACE" in os.environ:
    install(os.environ["ZHARNESS_TRACE"])
