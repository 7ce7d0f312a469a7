"""Replay the merged phases of a test to the plugins of the pytest process that report on tests or run them again.

[Note: what a plugin of the pytest process sees]
A plugin such as allure wraps itself around setup, call, teardown and the making of reports. On ranks it is silent
(``listeners.py``). Once a test has run on its ranks, the pytest process calls the plugin's wrappers around the merged
phases: each phase raises the error of the merged report, makes that report, and shows a failure once it is logged. Only
wrappers of such plugins are called: no fixture is set up, and no other plugin acts.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from zharness.pytest_ranks import allure_results
from zharness.pytest_ranks.listeners import find_listeners
from zharness.pytest_ranks.phase_report import PHASES
from zharness.pytest_ranks.side_effects import RankSideEffects


class PhaseReplay:
    """Pytest plugin that stands in for the phases of a test that ran on ranks."""

    def __init__(self, plugins: pytest.PytestPluginManager, further_plugins: Sequence[object]) -> None:
        """Prepare to replay to all plugins that report on tests; ``further_plugins`` only see the reports."""
        self._error: BaseException | None = None
        self._report: pytest.TestReport | None = None
        self._allure_results: dict[int, tuple[bytes, ...]] = {}  # the ranks' results of the test that is replayed
        self._last_calls: dict[str, pytest.CallInfo[None]] = {}  # by phase, until the report is logged
        plugins.register(self, "zharness-phase-replay")
        listeners = [self, *find_listeners(plugins)]
        self._has_plugins = len(listeners) > 1 or bool(further_plugins)
        self._hooks: dict[str, Any] = {
            name: plugins.subset_hook_caller(name, [plugin for plugin in plugins.get_plugins() if plugin not in kept])
            for name, kept in (
                *((f"pytest_runtest_{phase}", listeners) for phase in PHASES),
                ("pytest_runtest_makereport", [*listeners, *further_plugins]),
                ("pytest_exception_interact", listeners),
            )
        }

    def replay(
        self,
        item: pytest.Item,
        nextitem: pytest.Item | None,
        reports: Sequence[pytest.TestReport],
        side_effects: Mapping[int, RankSideEffects],
    ) -> list[pytest.TestReport]:
        """Return the merged reports of the phases of ``item`` as the plugins have changed them."""
        if not self._has_plugins:
            return [*reports]
        self._allure_results = {rank: effects.allure_results for rank, effects in side_effects.items()}
        return [self._replay_phase(item, nextitem, report) for report in reports]

    def _replay_phase(
        self, item: pytest.Item, nextitem: pytest.Item | None, report: pytest.TestReport
    ) -> pytest.TestReport:
        """Call the plugins' wrappers around one phase and around the making of its report."""
        phase = str(report.when)
        further = {"nextitem": nextitem} if phase == "teardown" else {}
        self._report, self._error = report, take_error(report)
        try:
            call = pytest.CallInfo.from_call(
                lambda: self._hooks[f"pytest_runtest_{phase}"](item=item, **further),
                phase,  # type: ignore[arg-type]  # a name of PHASES
            )
            self._error = None
            replayed: pytest.TestReport = self._hooks["pytest_runtest_makereport"](item=item, call=call)
        finally:
            self._report = self._error = None
        self._last_calls[phase] = call
        return replayed

    def show_failure(self, item: pytest.Item, report: pytest.TestReport) -> None:
        """Show a failed phase to the plugins, as pytest does once the report is logged."""
        call = self._last_calls.pop(str(report.when), None)
        if call is not None and call.excinfo is not None and report.failed:
            self._hooks["pytest_exception_interact"](node=item, call=call, report=report)

    def pytest_runtest_setup(self) -> None:
        """Raise the error of the merged setup that is replayed."""
        self._raise_error()

    def pytest_runtest_call(self) -> None:
        """Raise the error of the merged call that is replayed."""
        self._raise_error()

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Raise the error of the merged teardown that is replayed.

        Before that, add the allure data of the test, because allure completes its result around the teardown. Under
        torchrun this hook is also called for the test on rank 0 itself; then nothing is replayed.
        """
        results, self._allure_results = self._allure_results, {}
        allure_results.add_results(item.config, results)
        self._raise_error()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self) -> pytest.TestReport | None:
        """Return the merged report that is replayed; None if a test of the pytest process runs."""
        return self._report

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


ERROR_ATTRIBUTE = "zharness_pickled_error"  # of a report: the exception of the rank, pickled


def add_error(report: pytest.TestReport, error: BaseException | None) -> None:
    """Add the exception of a failed phase to its report, if it can be pickled and unpickled."""
    if error is None:
        return
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # noqa: S301 - written in the line above
    except Exception:  # noqa: BLE001 - an exception of a test may raise anything when it is pickled
        return
    setattr(report, ERROR_ATTRIBUTE, data)


def take_error(report: pytest.TestReport) -> BaseException | None:
    """Remove the exception from a merged report and return it; for a skip, return pytest's own exception.

    A failure whose exception could not be sent is an AssertionError with the message of the report.
    """
    data = vars(report).pop(ERROR_ATTRIBUTE, None)
    if report.passed:
        return None
    message = str(getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longreprtext))
    if report.skipped and not hasattr(report, "wasxfail"):
        return pytest.skip.Exception(message)
    error: BaseException | None = pickle.loads(data) if data is not None else None  # noqa: S301 - of our own rank
    return AssertionError(message) if error is None else error
