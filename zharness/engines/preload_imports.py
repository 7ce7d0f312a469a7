"""Lazy imports of a foreign engine, learned in a throw-away child and done in the process that will fork the ranks."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from contextlib import suppress

from zharness.world.orphans import die_with_parent


def preload_imports_of(use: Callable[[], None]) -> tuple[str, ...]:
    """Import in this process every module that ``use`` makes a forked child import; their names.

    ``use`` may run tensor operations, this process may not: a fork of a process that has used torch's thread pool
    hangs. A ``use`` that fails half-way has still told what it imported; the failure is for the ranks to show.
    """
    names = _record_imports(use)
    for name in names:
        # Some packages put modules into sys.modules that no file stands for, and some import only from within others.
        # Either comes with its package; a module that is left out here costs each rank its import, and nothing else.
        with suppress(ImportError):
            importlib.import_module(name)
    return names


def _record_imports(use: Callable[[], None]) -> tuple[str, ...]:
    before = set(sys.modules)
    reader, writer = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        die_with_parent(parent)
        os.close(reader)
        try:
            use()
        finally:
            with os.fdopen(writer, "w") as pipe:
                pipe.write("\n".join(sorted(set(sys.modules) - before)))
            # Not an ordinary exit: atexit handlers and buffers belong to the parent.
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return tuple(told.splitlines())
