"""Pytest plugin for ``torchrun ... -m pytest``: rank 0 chooses the tests and reports; the other ranks follow rank 0.

[Note: pytest under torchrun]
torchrun runs the same pytest command in every process. If tests on ranks or cells are collected, the plugin engages:
pytest on rank 0 reports, and its controller runs each test on the processes of the launch (``world/leader.py``). pytest
on the other ranks is silent and runs the tests that rank 0 sends. A test with a smaller world size than the launch runs
on the first ranks. A test with a larger world size is deselected. A test without a world size runs on rank 0 only. All
tests share the processes, but fixtures of every scope are set up again for each test, because the world size may differ
between tests. If neither tests on ranks nor cells are collected, every process runs pytest as usual.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from zharness.errors import UsageError
from zharness.pytest_ranks.rank_requirements import parse_world_size
from zharness.pytest_ranks.silent_pytest import (
    DeferredTerminalOutput,
    find_capture_files,
    unregister_file_writers,
    use_private_basetemp,
)
from zharness.pytest_ranks.torchrun_controller import (
    CollectionQuery,
    CollectionReply,
    TorchrunTestController,
    TorchrunTestRunner,
)
from zharness.world import GroupOutcome
from zharness.world.launch import Launch, detect_launch
from zharness.world.launched_rank import Follower
from zharness.world.leader import Leader

PLUGIN_NAME = "zharness-torchrun"


def register_torchrun_plugin(config: pytest.Config) -> None:
    """Register the plugin if torchrun started this process and neither xdist nor ``--collect-only`` is in use."""
    uses_xdist = getattr(config.option, "dist", "no") != "no" or hasattr(config, "workerinput")
    launch = None if uses_xdist or config.option.collectonly else detect_launch()
    if launch is not None:
        config.pluginmanager.register(TorchrunPlugin(config, launch), PLUGIN_NAME)


def get_torchrun_plugin(config: pytest.Config) -> TorchrunPlugin | None:
    """Return the plugin if it is registered and engaged, else None."""
    plugin: TorchrunPlugin | None = config.pluginmanager.getplugin(PLUGIN_NAME)
    return plugin if plugin is not None and plugin.engaged else None


class TorchrunPlugin:
    """The pytest plugin of one process of the launch: rank 0 has a ``leader``, every other rank has a follower."""

    def __init__(self, config: pytest.Config, launch: Launch) -> None:
        self.engaged = False  # whether tests on ranks or cells were collected
        self.leader: Leader | None = None
        self._config = config
        self._launch = launch
        self._terminal_output = DeferredTerminalOutput(config)
        self._follower: Follower | None = None
        self._controller: TorchrunTestController | None = None
        self._items_by_nodeid: dict[str, pytest.Item] = {}
        self._collection_errors: list[str] = []
        self._deselected_tests: list[str] = []
        self._exit_status = 0
        self._running_nodeid = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """Buffer the output of every rank other than 0 until the collection shows whether the plugin engages."""
        if self._launch.rank:
            self._terminal_output.start_buffering()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep collection errors, which may explain to rank 0 why this rank did not collect a test."""
        if report.failed:
            self._collection_errors.append(f"{report.nodeid}: {report.longreprtext}")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, object, object]:
        """Engage if tests on ranks or cells were collected, and deselect tests with too many ranks.

        Remembers all tests before any is deselected: rank 0 may send a test that this process deselects, for example
        because of its own cache of failed tests.
        """
        self._items_by_nodeid = {item.nodeid: item for item in items}
        result = yield
        try:
            self.engaged = any(get_item_world_size(item) is not None for item in self._items_by_nodeid.values())
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None
        if self.engaged:
            self._deselect_oversized(items)
        return result

    def _deselect_oversized(self, items: list[pytest.Item]) -> None:
        """Deselect the tests that need more ranks than were launched."""
        oversized = [item for item in items if (get_item_world_size(item) or 1) > self._launch.world_size]
        if oversized:
            items[:] = [item for item in items if item not in oversized]
            self._config.hook.pytest_deselected(items=oversized)
            self._deselected_tests = [f"{item.nodeid} (world size {get_item_world_size(item)})" for item in oversized]

    def pytest_report_collectionfinish(self) -> list[str]:
        """Print which launch runs the tests, and which tests were deselected for their world size."""
        if not self.engaged:
            return []
        lines = [
            f"attached to {self._launch.describe()}; --isolation has no effect: all tests share the processes, and "
            "fixtures of every scope are set up again for each test"
        ]
        if self._deselected_tests:
            lines.append(
                f"deselected, because only {self._launch.world_size} ranks were launched: "
                f"{', '.join(self._deselected_tests)}"
            )
        return lines

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Make this process the leader (rank 0) or a follower, and check that all ranks collected the same tests."""
        if not self.engaged:
            self._terminal_output.release()
            return
        test_runner = TorchrunTestRunner(session)
        capture_files = find_capture_files(self._config)
        if self._launch.rank:
            self._terminal_output.discard()
            unregister_file_writers(self._config)
            use_private_basetemp(self._config, self._launch.rank)
            self._follower = Follower(self._launch, test_runner, capture_files)
            self._follower.answer_leader(lambda query: self._answer_query(session, query))
            return
        self.leader = Leader(self._launch, self._report_lost_rank, test_runner, capture_files)
        try:
            self._controller = TorchrunTestController(session, self.leader)
            self._config.pluginmanager.register(self._controller, "zharness-controller")
            self._controller.verify_collection()
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None

    def _answer_query(self, session: pytest.Session, query: CollectionQuery) -> CollectionReply:
        """Reply which tests of rank 0 are missing here, and sort this rank's tests in the order of rank 0."""
        session.items[:] = [self._items_by_nodeid[name] for name in query.nodeids if name in self._items_by_nodeid]
        missing = tuple(name for name in query.nodeids if name not in self._items_by_nodeid)
        return CollectionReply(missing, tuple(self._collection_errors), Path(query.file).exists())

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> bool | None:
        """On a follower, run the tests that rank 0 sends until the session ends; on rank 0, let pytest run its loop."""
        if self._follower is None:
            return None
        self._exit_status = self._follower.follow()
        return True

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Remember the running test, so that the report of a lost rank can name the test."""
        self._running_nodeid = nodeid

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """End a follower with the exit status of rank 0; on rank 0, stop watching for lost ranks."""
        if self._follower is not None:
            session.exitstatus = self._exit_status
        if self.leader is not None:
            self.leader.stop_guard()

    @pytest.hookimpl(trylast=True, specname="pytest_sessionfinish")
    def pytest_set_follower_status(self, session: pytest.Session) -> None:
        """Pass the final exit status to the followers, after all other plugins have had the chance to change the
        status.
        """
        if self.leader is not None:
            self.leader.follower_status = int(session.exitstatus)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """On rank 0, end the followers."""
        if self.leader is not None:
            self.leader.close()

    def _report_lost_rank(self, outcome: GroupOutcome | None, message: str) -> int:
        """Write the session's report after a rank was lost, with the running test as failed; return the exit status.

        The function does not tear down fixtures, because their teardown could hang as well.
        """
        config = self._config
        capture = config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            capture.suspend(in_=True)
            if capture.is_globally_capturing():
                capture.read_global_capture()  # discard it: the outcome contains it, and pytest would print it again
        assert self._controller is not None, "the leader runs tasks only after the controller was created"
        session = self._controller.session
        if outcome is not None:
            self._controller.log_lost_test(outcome, message)
        elif self._running_nodeid:
            message = f"{message} ({self._running_nodeid} was running on rank 0)"
        session.shouldfail = message
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        session._setupstate.stack.clear()
        config.hook.pytest_sessionfinish(session=session, exitstatus=session.exitstatus)
        config._ensure_unconfigure()
        return int(session.exitstatus)


def get_item_world_size(item: pytest.Item) -> int | None:
    """Return the world size of a test on ranks or of a test's cell; None for any other test."""
    planned_cell = getattr(getattr(item, "callspec", None), "params", {}).get("cell")
    size: int | None = getattr(getattr(planned_cell, "cell", None), "world_size", None)
    return parse_world_size(item) if size is None else size
