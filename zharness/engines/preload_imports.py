"""Import in the rank server the modules that an engine imports lazily, so that no rank imports them itself."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from contextlib import suppress

from zharness.world.orphans import die_with_parent


def preload_imports_of(use: Callable[[], None]) -> tuple[str, ...]:
    """Run ``use`` in a forked child, then import in this process the modules that ``use`` imported.

    Returns the names of these modules. ``use`` may run tensor operations. This process must not run any, because they
    start torch's thread pool, and a rank that is forked afterwards hangs. If ``use`` fails, the modules that were
    imported before the failure are imported here, and the ranks will report the failure.
    """
    names = _record_imports(use)
    for name in names:
        # Some names in sys.modules have no file, and some modules can be imported only by their own package. Both are
        # imported with that package. A module that is skipped here costs each rank only the time of its import.
        with suppress(ImportError):
            importlib.import_module(name)
    return names


def _record_imports(use: Callable[[], None]) -> tuple[str, ...]:
    """Run ``use`` in a forked child and return the names of the modules that it imported."""
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
            # os._exit, because atexit handlers and buffered output belong to the parent.
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        names = pipe.read()
    os.waitpid(child, 0)
    return tuple(names.splitlines())
