"""Work with pytest plugins that run tests again or limit their time, and refuse those that ranks cannot follow."""

from __future__ import annotations

import math
from collections.abc import Callable
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


def refuse_unsupported_plugins(config: pytest.Config) -> None:
    """Raise UsageError if a plugin is active that runs the phases of tests by itself, which ranks cannot follow."""
    for name, description in UNSUPPORTED.items():
        if config.pluginmanager.hasplugin(name):
            raise UsageError(f"tests on ranks cannot run beside the plugin {description}; disable it with -p no:{name}")


def get_rerun_plugin(config: pytest.Config) -> Any:
    """Return pytest-rerunfailures' module if it is active, else None."""
    plugin = config.pluginmanager.getplugin("rerunfailures") or config.pluginmanager.getplugin("pytest_rerunfailures")
    return plugin if hasattr(plugin, "get_reruns_count") else None


def run_again_if_failed(item: pytest.Item, nextitem: pytest.Item | None, attempt: Attempt) -> bool:
    """Let pytest-rerunfailures run and log the test, and return True; return False if it does not rerun this test.

    ``attempt`` runs the test once on its ranks and returns the reports. The plugin decides about each of them, and logs
    them, as for a test that pytest runs itself.
    """
    plugin = get_rerun_plugin(item.config)
    if plugin is None or plugin.get_reruns_count(item) is None:
        return False
    with pytest.MonkeyPatch.context() as patch:
        # The plugin has no hook for this: it imports pytest's own function by name.
        patch.setattr(plugin, "runtestprotocol", lambda *_, **__: attempt())
        return bool(plugin.pytest_runtest_protocol(item=item, nextitem=nextitem))


def count_failed_subtests(item: pytest.Item, reports: list[pytest.TestReport]) -> None:
    """Count the failed subtests of a test that is run again, as pytest does; pytest-rerunfailures reads the count."""
    try:
        from _pytest.subtests import failed_subtests_key
    except ImportError:  # pytest before 9
        return
    if isinstance(item, TestCaseFunction):
        return  # pytest counts none of unittest's: they do not fail the test
    failed = sum(report.failed for report in reports)
    if failed:
        item.config.stash[failed_subtests_key][item.nodeid] += failed


def get_plugin_timeout(item: pytest.Item) -> tuple[float | None, float | None]:
    """Return the seconds that pytest-timeout's marker and its options allow for a test; None where it has none.

    Zero in the marker, with which pytest-timeout sets no limit, is returned as infinity. Zero in an option counts as
    none.
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
