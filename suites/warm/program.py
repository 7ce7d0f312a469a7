"""A fork of a warm Python that becomes the program it was forked for."""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO, TextIOWrapper
from types import ModuleType
from typing import NoReturn

import torch

from suites.warm.program_request import ProgramRequest


def set_up_process(request: ProgramRequest, streams: Sequence[int]) -> None:
    """Give this process the session, signals, streams, folder and environment that a shell would have given it."""
    if request.new_session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit it as ignored
    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    # Recompute what Python or a library had read from the environment at its start.
    tempfile.tempdir = None
    for folder in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if folder and folder not in sys.path[1:]:
            sys.path.insert(1, folder)
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def run_program(arguments: Sequence[str]) -> NoReturn:
    """Run a program and end this process as Python does, but leave its memory to the system.

    Python would free the modules of torch one by one at its end, which takes 0.3 seconds of a fork.
    """
    status = 0
    try:
        run_command(arguments)
    except SystemExit as end:
        status = read_exit_code(end.code)
    except BaseException:  # noqa: BLE001 - Python prints any exception that ends its program
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # what Python calls to wait for threads, before the exit functions
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed or replaced by the program
            stream.flush()
    os._exit(status)


def read_exit_code(code: object) -> int:
    """Return the exit status that Python gives for the argument of ``sys.exit``; print an argument that is a text."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def run_command(arguments: Sequence[str]) -> NoReturn:
    """Run a program as Python runs its command line; raises SystemExit, or the program's own exception."""
    if arguments[0] == "-u":
        # New streams: the existing ones buffer, and the program may die before it flushes them.
        sys.stdout, sys.stderr = (
            TextIOWrapper(FileIO(target, "wb", closefd=False), errors=stream.errors, write_through=True)
            for target, stream in ((1, sys.stdout), (2, sys.stderr))
        )
        arguments = arguments[1:]
    if arguments[0] == "-m":
        sys.argv, sys.path[0] = ["-m", *arguments[2:]], os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        sys.exit(0)
    try:
        run_code_or_file(arguments)
    except KeyboardInterrupt:
        # Like Python: after the exit functions, end by the signal, so that a shell sees it.
        sys.excepthook(*sys.exc_info())
        atexit._run_exitfuncs()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    sys.exit(0)


def run_code_or_file(arguments: Sequence[str]) -> None:
    """Run a program given as text after ``-c``, or as a file."""
    if arguments[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(arguments[1], main.__dict__)  # noqa: S102 - that is what -c means
    else:
        sys.argv, sys.path[0] = list(arguments), os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")
