"""Pytest plugin that switches off the mechanism that SWITCHED_OFF names, so that its tests can be seen to fail."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import NoReturn

from torch.utils.file_baton import FileBaton

from zharness import plugin
from zharness.compat import deepspeed
from zharness.engines import deepspeed_operators, deepspeed_process
from zharness.pytest_ranks import (
    allure_results,
    benchmarks,
    hypothesis_sync,
    listeners,
    plugin_support,
    rank_requirements,
)
from zharness.pytest_ranks.rank_protocol import PhaseReporter
from zharness.world import process_group

VARIABLE = "SWITCHED_OFF"


def take_inner_reports_for_phases() -> None:
    """Take a report that is made while a phase runs, such as that of a subtest, for the report of the phase."""
    PhaseReporter.is_in_phase = property(lambda _: False, lambda *_: None)  # type: ignore[assignment]


def ignore_timeouts() -> None:
    """Let pytest-timeout set its own timer, and ignore its limits."""
    del plugin.pytest_timeout_set_timer
    rank_requirements.get_plugin_timeout = lambda _: (None, None)


def ignore_benchmarks() -> None:
    """Calibrate every rank by its own durations, and send no results to the pytest process."""
    benchmarks.sync_benchmarks = lambda _: nullcontext()
    benchmarks.take_results = lambda _: ()


def leave_locks_of_builds() -> None:
    """Leave the lock of a killed build where it is, and raise where torch would wait for it forever."""

    def refuse_to_wait(lock: FileBaton) -> NoReturn:
        raise RuntimeError(f"waits forever for {lock.lock_file_path}")

    deepspeed_operators.remove_stale_lock = lambda _: None
    FileBaton.wait = refuse_to_wait  # type: ignore[method-assign]


MECHANISMS: Mapping[str, Callable[[], object]] = {
    "subtests": take_inner_reports_for_phases,
    "hypothesis": lambda: setattr(hypothesis_sync, "note_while_waiting", lambda _: nullcontext()),
    "rerunfailures": lambda: setattr(plugin_support, "get_rerun_plugin", lambda _: None),
    "reporting": lambda: setattr(listeners, "find_listeners", lambda _: []),
    "allure": lambda: setattr(allure_results, "start_result", lambda _: None),
    "timeout": ignore_timeouts,
    "benchmark": ignore_benchmarks,
    "ddp": lambda: setattr(process_group, "skip_construction_log_of_ddp", lambda: None),
    "ids": lambda: setattr(deepspeed.DistributedExec, "_keeps_ids", False),
    "shared memory": lambda: setattr(deepspeed_process, "SHM_VARIABLE", "UNREAD"),
    "stale lock": leave_locks_of_builds,
}

if VARIABLE in os.environ:
    MECHANISMS[os.environ[VARIABLE]]()
