"""Work with pytest plugins that run tests again, limit their time, or store data of their own about a report.

Plugins that cannot work with ranks are refused.
"""

from __future__ import annotations

import math
import os
import pickle
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from _pytest.unittest import TestCaseFunction

from zharness.errors import UsageError

Attempt = Callable[[], list[pytest.TestReport]]

# Plugins that run the phases of a test by themselves, by the names under which they are registered.
UNSUPPORTED = {
    "flaky": "flaky (its own phases of a test; pytest-rerunfailures works)",
    "pytest-retry": "pytest-retry (its own phases of a test; pytest-rerunfailures works)",
    "pytest_retry": "pytest-retry (its own phases of a test; pytest-rerunfailures works)",
}


def refuse_unsupported_plugins(config: pytest.Config, rank_tests: Iterable[pytest.Item]) -> None:
    """Raise UsageError if a plugin is active that runs the phases of tests by itself, without the ranks.

    mpi-pytest runs only the tests with its marker by itself, so only ``rank_tests`` with this marker are refused. Under
    mpiexec all ``rank_tests`` are refused, because each of its processes would start ranks of its own.
    """
    for name, description in UNSUPPORTED.items():
        if config.pluginmanager.hasplugin(name):
            raise UsageError(f"tests on ranks cannot run beside the plugin {description}; disable it with -p no:{name}")
    if config.pluginmanager.hasplugin("pytest_mpi") or config.pluginmanager.hasplugin("pytest_mpi.plugin"):
        both = next((item for item in rank_tests if item.get_closest_marker("parallel") is not None), None)
        if both is not None:
            raise UsageError(
                f"{both.nodeid} has the marker world_size and the marker parallel of mpi-pytest, which runs the test in"
                " processes of its own; keep one of the two markers"
            )
        processes = count_mpi_processes()
        first = next(iter(rank_tests), None)
        if processes > 1 and first is not None:
            raise UsageError(
                f"{first.nodeid} runs on ranks, which each of the {processes} processes of mpiexec would start for"
                " itself; run such tests without mpiexec, or leave them out here, for example with -m 'parallel[match]'"
            )


def count_mpi_processes() -> int:
    """Return the number of processes of the mpiexec under which this session runs; 1 in a process of mpi-pytest."""
    mpi: Any = sys.modules.get("mpi4py.MPI")  # imported by mpi-pytest
    return 1 if mpi is None or "_PYTEST_MPI_CHILD_PROCESS" in os.environ else int(mpi.COMM_WORLD.size)


def get_rerun_plugin(config: pytest.Config) -> Any:
    """Return pytest-rerunfailures' module if it is active, else None."""
    plugin = config.pluginmanager.getplugin("rerunfailures") or config.pluginmanager.getplugin("pytest_rerunfailures")
    return plugin if hasattr(plugin, "get_reruns_count") else None


def run_again_if_failed(item: pytest.Item, nextitem: pytest.Item | None, attempt: Attempt) -> bool:
    """Let pytest-rerunfailures run and log the test, and return True; return False if it does not rerun this test.

    ``attempt`` runs the test once on its ranks and returns the reports. The plugin inspects each report and logs the
    reports, as for a test that pytest runs itself.
    """
    plugin = get_rerun_plugin(item.config)
    if plugin is None or plugin.get_reruns_count(item) is None:
        return False
    with pytest.MonkeyPatch.context() as patch:
        # The plugin has no hook for this, so its reference to pytest's own function is replaced.
        patch.setattr(plugin, "runtestprotocol", lambda *_, **__: attempt())
        return bool(plugin.pytest_runtest_protocol(item=item, nextitem=nextitem))


def count_failed_subtests(item: pytest.Item, reports: list[pytest.TestReport]) -> None:
    """Count the failed subtests of a test that is run again, as pytest does; pytest-rerunfailures reads the count."""
    try:
        from _pytest.subtests import failed_subtests_key
    except ImportError:  # pytest before 9
        return
    if isinstance(item, TestCaseFunction):
        return  # pytest does not count subtests of unittest, because they do not fail the test
    failed = sum(report.failed for report in reports)
    if failed:
        item.config.stash[failed_subtests_key][item.nodeid] += failed


def get_plugin_timeout(item: pytest.Item) -> tuple[float | None, float | None]:
    """Return the seconds that pytest-timeout's marker and its options allow for a test; None for each that is missing.

    Zero in the marker, with which pytest-timeout sets no limit, is returned as infinity. Zero in an option is returned
    as None.
    """
    plugin: Any = item.config.pluginmanager.getplugin("timeout")
    if not hasattr(plugin, "_get_item_settings"):
        plugin = item.config.pluginmanager.getplugin("pytest_timeout")
    if not hasattr(plugin, "_get_item_settings"):
        return None, None
    by_marker = plugin._get_item_settings(item).timeout if item.get_closest_marker("timeout") is not None else None
    if by_marker is not None and by_marker <= 0:
        by_marker = math.inf
    return by_marker, item.config._env_timeout or None  # type: ignore[attr-defined]  # set by pytest-timeout


SCENARIO_ATTRIBUTE = "zharness_scenario"  # the attribute of a report with pytest-bdd's data on its scenario


def add_scenario(report: pytest.TestReport) -> None:
    """Add the steps of a pytest-bdd scenario to the report; the plugin itself stores them outside of the report."""
    reporting = sys.modules.get("pytest_bdd.reporting")
    context = getattr(reporting, "test_report_context_registry", {}).get(report)
    if context is not None:
        setattr(report, SCENARIO_ATTRIBUTE, pickle.dumps(context))


def take_scenario(report: pytest.TestReport) -> None:
    """Move the steps of a scenario from a merged report to pytest-bdd's registry, where its reporters look."""
    data = vars(report).pop(SCENARIO_ATTRIBUTE, None)
    reporting = sys.modules.get("pytest_bdd.reporting")
    if data is not None and reporting is not None:
        reporting.test_report_context_registry[report] = pickle.loads(data)  # noqa: S301 - of our own rank
