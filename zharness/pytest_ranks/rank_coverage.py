"""Measure code coverage on ranks if the pytest process measures its own coverage.

A rank inherits the running measurement through its fork, with the same options, and saves the measurement to a data
file of its own when it exits. pytest-cov combines these files at the end of the session. After ``coverage run
--parallel-mode -m pytest`` the user runs ``coverage combine``; without ``--parallel-mode`` nothing would combine the
files, so ranks save none. The measurement of a rank that crashes or is killed is lost.
"""

from __future__ import annotations

import atexit
import sys
from typing import Any

from zharness.world.rank import ServerChannel

# Warnings of a process that measured nothing or not everything, which is expected if other processes measure the rest.
PARTIAL_DATA_WARNINGS = ["no-data-collected", "module-not-imported", "module-not-measured"]


def get_current_coverage() -> Any:
    """Return the ``Coverage`` object that measures this process, or None if the process is not measured.

    The function does not import the package coverage, which is not a dependency: a process that is measured has already
    imported it.
    """
    coverage = sys.modules.get("coverage")
    return None if coverage is None else coverage.Coverage.current()


def silence_worker_coverage() -> None:
    """Disable coverage's no-data warnings in an xdist worker, because all tests of the worker may run on ranks."""
    coverage = get_current_coverage()
    if coverage is not None:
        disable_partial_warnings(coverage)


def set_up_rank_coverage(channel: ServerChannel) -> None:
    """Make this rank save its coverage data when it exits, if the pytest process measures in parallel mode.

    If the pytest process does not measure in parallel mode, stop measuring on this rank.
    """
    coverage = get_current_coverage()
    if coverage is None:
        return
    if not coverage.get_option("run:parallel"):
        coverage.stop()  # there is one data file, and the pytest process writes it
        return
    disable_partial_warnings(coverage)
    atexit.register(save_rank_coverage, coverage, channel)


def disable_partial_warnings(coverage: Any) -> None:
    """Disable coverage's warnings about a process that measured no code, or only part of the code."""
    disabled = coverage.get_option("run:disable_warnings")
    coverage.set_option("run:disable_warnings", [*disabled, *PARTIAL_DATA_WARNINGS])


def save_rank_coverage(coverage: Any, channel: ServerChannel) -> None:
    """Save the rank's coverage data to a file that coverage names after the process; called when the rank exits.

    Suspends the rank's deadline, because a rank has only half a second to exit after a failure, and many ranks write
    their files at the same time.
    """
    channel.hold("it saves its coverage data")
    coverage.stop()
    coverage.save()
    channel.hold("")
