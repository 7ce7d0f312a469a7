"""Silence plugins that report on tests on the ranks: the pytest process reports one merged test, not one per rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

# The hooks that tell a plugin about tests that have run. On a rank, only the reporter of the phases receives them.
LISTENING_HOOKS = ("pytest_runtest_logstart", "pytest_runtest_logreport", "pytest_runtest_logfinish")
# The hooks that a reporting plugin wraps to follow a test.
FOLLOWED_HOOKS = (
    *("pytest_runtest_protocol", "pytest_runtest_setup", "pytest_runtest_call", "pytest_runtest_teardown"),
    *(
        "pytest_runtest_makereport",
        "pytest_fixture_setup",
        "pytest_fixture_post_finalizer",
        "pytest_exception_interact",
        "pytest_report_teststatus",
    ),
)


_silenced: list[tuple[Any, list[Any]]] = []  # each hook with silenced plugins, and all its functions


def find_listeners(plugins: pytest.PytestPluginManager) -> list[object]:
    """Return the installed plugins that report on tests.

    These plugins implement a hook about tests that have run, or wrap the hook that names a report's outcome for the
    terminal, as VS Code's plugin does. Plugins of pytest and of this package are not returned. A conftest.py is not
    returned either, because its hooks may also act on tests.
    """
    impls = [impl for name in LISTENING_HOOKS for impl in getattr(plugins.hook, name).get_hookimpls()]
    impls += [
        impl for impl in plugins.hook.pytest_report_teststatus.get_hookimpls() if impl.hookwrapper or impl.wrapper
    ]
    listening = {id(impl.plugin): impl.plugin for impl in impls}
    return [plugin for plugin in listening.values() if is_installed_plugin(plugin)]


def is_installed_plugin(plugin: object) -> bool:
    """Return whether ``plugin`` is neither a part of pytest or of this package nor a conftest.py."""
    if isinstance(plugin, ModuleType):
        return not (is_own_module(plugin.__name__) or str(plugin.__file__).endswith("conftest.py"))
    return not is_own_module(type(plugin).__module__)


def is_own_module(name: str) -> bool:
    """Return whether a module belongs to pytest or to this package."""
    return name.partition(".")[0] in ("_pytest", "pytest", "zharness")


@contextmanager
def silence_listeners(plugins: pytest.PytestPluginManager, reporter: object) -> Iterator[None]:
    """Within the block, report on tests to ``reporter`` only, and call no hook of a plugin that reports on tests."""
    listeners = find_listeners(plugins)
    with_reporter_only = {name: [reporter] for name in LISTENING_HOOKS}
    # The code that calls the hooks looks them up by itself, and pluggy has no public way to exclude plugins there.
    callers: list[Any] = [getattr(plugins.hook, name) for name in (*LISTENING_HOOKS, *FOLLOWED_HOOKS)]
    originals = [caller.get_hookimpls() for caller in callers]
    for caller, impls in zip(callers, originals, strict=True):
        kept = with_reporter_only.get(caller.name)
        caller._hookimpls[:] = [
            impl for impl in impls if (impl.plugin not in listeners if kept is None else impl.plugin in kept)
        ]
    _silenced[:] = zip(callers, originals, strict=True)
    try:
        yield
    finally:
        restore_listeners()


def restore_listeners() -> None:
    """Call all plugins again. Another thread may call this function while the block runs, to report that it hangs."""
    for caller, impls in _silenced:
        caller._hookimpls[:] = impls
    _silenced.clear()
