"""Coverage of what runs in a rank, where the pytest process measures its own.

A rank goes on with the measurement that it has by its fork, of the same files under the same options, and writes its
data to a file of its own when it leaves. pytest-cov combines all such files at the end of the session; after
``coverage run --parallel-mode -m pytest`` that is for ``coverage combine`` to do, and without that option nobody would,
so ranks write nothing. A rank that dies or is killed has not left, and what it had measured is lost.
"""

from __future__ import annotations

import atexit
import sys
from typing import Any

from zharness.world.rank import ServerChannel

# Said by a process that has measured nothing or not everything, which is no news where others measure the rest.
PARTIAL_DATA_WARNINGS = ["no-data-collected", "module-not-imported", "module-not-measured"]


def get_current_coverage() -> Any:
    """The measurement of this process, or None. coverage is not a dependency: who measures has imported it."""
    coverage = sys.modules.get("coverage")
    return None if coverage is None else coverage.Coverage.current()


def silence_worker_coverage() -> None:
    """In a worker of xdist: it may run nothing but tests in ranks, and so measure nothing by itself."""
    mine = get_current_coverage()
    if mine is not None:
        disable_partial_warnings(mine)


def set_up_rank_coverage(channel: ServerChannel) -> None:
    """In each rank: have what is measured written when it leaves, if anything is measured at all."""
    inherited = get_current_coverage()
    if inherited is None:
        return
    if not inherited.get_option("run:parallel"):
        inherited.stop()  # one data file for all processes, which is the pytest process's
        return
    disable_partial_warnings(inherited)
    atexit.register(save_rank_coverage, inherited, channel)


def disable_partial_warnings(coverage: Any) -> None:
    """Let it not warn that it has seen too little."""
    own = coverage.get_option("run:disable_warnings")
    coverage.set_option("run:disable_warnings", [*own, *PARTIAL_DATA_WARNINGS])


def save_rank_coverage(coverage: Any, channel: ServerChannel) -> None:
    """Write the rank's data; called when the rank leaves. coverage names the file by the process.

    With the deadline off: after a failure a rank has half a second to leave, and many write at once.
    """
    channel.hold("it writes its coverage")
    coverage.stop()
    coverage.save()
    channel.hold("")
