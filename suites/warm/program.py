"""A fork of a warm Python that becomes the program it was forked for."""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Sequence
from io import FileIO, TextIOWrapper
from types import ModuleType
from typing import NoReturn

import torch

from suites.warm.orders import Order


def settle(order: Order, streams: Sequence[int]) -> None:
    """Make this process what a shell would have started: its session, signals, streams, folder and environment."""
    if order.new_session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored below a shell's background
    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environment)
    # What was found out when Python or a library started follows from the environment that there is now.
    tempfile.tempdir = None
    for place in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if place and place not in sys.path[1:]:
            sys.path.insert(1, place)
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def run(words: Sequence[str]) -> NoReturn:
    """What Python does with the words of its command line; raises SystemExit, or what the program raises."""
    if words[0] == "-u":
        # Anew: those that there are keep what is written until they are flushed, and a program may die before.
        sys.stdout, sys.stderr = (
            TextIOWrapper(FileIO(target, "wb", closefd=False), errors=stream.errors, write_through=True)
            for target, stream in ((1, sys.stdout), (2, sys.stderr))
        )
        words = words[1:]
    if words[0] == "-m":
        sys.argv, sys.path[0] = ["-m", *words[2:]], os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        sys.exit(0)
    try:
        text_or_file(words)
    except KeyboardInterrupt:
        # Python ends by the signal then, after all that it does at its end, so that a shell sees what happened.
        sys.excepthook(*sys.exc_info())
        atexit._run_exitfuncs()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    sys.exit(0)


def text_or_file(words: Sequence[str]) -> None:
    """A program given as text behind ``-c``, or as a file."""
    if words[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *words[2:]], ""
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(words[1], main.__dict__)  # noqa: S102 - that is what -c means
    else:
        sys.argv, sys.path[0] = list(words), os.path.dirname(os.path.abspath(words[0]))
        runpy.run_path(words[0], run_name="__main__")
