"""Run tests on ranks from the pytest process: send each test to its ranks and log one merged verdict for it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import pytest

from zharness import engines
from zharness.engines.warm_up import build_warm_up_environment
from zharness.errors import UsageError
from zharness.pytest_ranks import benchmarks, plugin_support, rank_coverage, remote_fixtures
from zharness.pytest_ranks.inner_reports import merge_inner_reports
from zharness.pytest_ranks.known_examples import NO_EXAMPLES, KnownExamples, run_all_examples
from zharness.pytest_ranks.merge_reports import merge_reports
from zharness.pytest_ranks.phase_replay import PhaseReplay
from zharness.pytest_ranks.pool_teardown import make_pool_teardown_reports
from zharness.pytest_ranks.rank_protocol import RankTestRunner
from zharness.pytest_ranks.rank_requirements import RankRequirements, check_item_world_sizes, get_rank_requirements
from zharness.pytest_ranks.side_effects import (
    RankSideEffects,
    add_leftovers,
    find_session_stop,
    iter_side_effects,
    replay_warning,
    stop_session,
)
from zharness.pytest_ranks.terminal import open_terminal, reclaim_terminal
from zharness.world import GroupOutcome, Isolation, RankEnd, RankOutcome, RankServer
from zharness.world.server import RankEnvironment


@dataclass(frozen=True)
class ActivePool:
    """A rank pool whose ranks are still running.

    ``requirements`` are the requirements of its tests, ``last_item`` is the last test that ran in the pool, and
    ``fixture_nodes`` are the pytest nodes whose fixtures may still be set up in the pool.
    """

    requirements: RankRequirements
    last_item: pytest.Item
    fixture_nodes: frozenset[object]


class RankTestController:
    """Pytest plugin that runs every test with a world size on ranks and leaves all other tests to pytest.

    Create the plugin after collection and before any fixture is set up: its servers are forks of this process, so
    their ranks inherit every collected test and no fixture.
    """

    def __init__(self, session: pytest.Session) -> None:
        """Fork the rank servers. Raises UsageError for an invalid marker or a world size that cannot be started."""
        self._session = session
        self._item_indices = {item: index for index, item in enumerate(session.items)}
        self._test_numbers = count(1)
        self._pools: dict[tuple[str, int], ActivePool] = {}
        item_requirements = {item: get_rank_requirements(item) for item in session.items}
        rank_tests = {item: found for item, found in item_requirements.items() if found is not None}
        check_item_world_sizes(session.items)
        self._base_dir = get_tmp_path_base(session.config)
        plugin_support.refuse_unsupported_plugins(session.config, rank_tests)
        rerun_plugin = plugin_support.get_rerun_plugin(session.config)
        self._replay = PhaseReplay(session.config.pluginmanager, [rerun_plugin] if rerun_plugin else [])
        self._attempted_item: pytest.Item | None = None
        self._attempt_reports: list[pytest.TestReport] = []
        self._terminal = open_terminal(session.config)
        test_runner = RankTestRunner(session, self._terminal, main_process_plugins=(self,))
        if hasattr(session.config, "workerinput"):
            rank_coverage.silence_worker_coverage()
        warm_engines = sorted({requirements.warm_engine for requirements in rank_tests.values()})
        self._servers = {engine: self._make_server(engine, test_runner) for engine in warm_engines}
        # Servers can be forked only now, before fixtures are set up; so also fork spare servers for killed ones.
        self._spare_servers = {engine: self._make_server(engine, test_runner) for engine in warm_engines}

    def _make_server(self, warm_engine: str, test_runner: RankTestRunner) -> RankServer:
        """Fork the rank server that imports ``warm_engine``; an empty name imports no engine."""
        echo = self._session.config.getoption("capture") == "no"
        return RankServer(make_test_environment(warm_engine, echo), inherited_function=test_runner)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Run a test that has a world size on its ranks; return None to leave any other test to pytest."""
        requirements = get_rank_requirements(item)
        if requirements is None:
            return None
        if plugin_support.run_again_if_failed(item, nextitem, lambda: self._attempt(item, nextitem, requirements)):
            return True
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        try:
            self._run_rank_test(item, nextitem, requirements)
        finally:
            item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _attempt(
        self, item: pytest.Item, nextitem: pytest.Item | None, requirements: RankRequirements
    ) -> list[pytest.TestReport]:
        """Run one test on its ranks and return the reports of its phases without logging them."""
        self._attempted_item, self._attempt_reports = item, []
        try:
            self._run_rank_test(item, nextitem, requirements)
        finally:
            self._attempted_item = None
        return self._attempt_reports

    @pytest.hookimpl(wrapper=True, specname="pytest_runtest_protocol")
    def pytest_tear_down_pools(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """After every test, tear down the fixtures in rank pools that the next test does not need, as pytest does."""
        result = yield
        self._tear_down_pools(nextitem)
        return result

    def pytest_sessionfinish(self) -> None:
        """Tear down the rank pools of a session that was stopped early.

        Failures are issued as warnings, because pytest accepts no more reports at this time.
        """
        for report in self._iter_pool_teardowns(None):
            if report.failed:
                warnings.warn(f"{report.nodeid}: {report.longreprtext}", pytest.PytestWarning, stacklevel=1)

    def pytest_unconfigure(self) -> None:
        """Stop the rank servers and remove the empty directories of tests."""
        for server in (*self._servers.values(), *self._spare_servers.values()):
            server.close()
        for test_dir in self._base_dir.glob("ranks-*"):
            remove_empty_dirs(test_dir)

    def _run_rank_test(self, item: pytest.Item, nextitem: pytest.Item | None, requirements: RankRequirements) -> None:
        """Run one test on its ranks and log its reports."""
        test_dir = self._new_test_dir()
        remote_reports = self._set_up_remote_fixtures(item, nextitem, requirements, test_dir)
        if remote_reports is None:
            return
        outcome = self._run_on_ranks(item, nextitem, requirements, test_dir)
        side_effects = dict(iter_side_effects(outcome))
        outcome = add_leftovers(outcome, side_effects)
        stop = find_session_stop(outcome)
        reports = [] if stop is not None else merge_reports(item, outcome)
        remote_fixtures.add_remote_setup(remote_reports, reports)
        reports = add_local_teardown(item, nextitem, reports)
        if stop is None:
            inner_reports = merge_inner_reports(item, outcome)
            if item is self._attempted_item:
                plugin_support.count_failed_subtests(item, inner_reports)
            reports = self._replay.replay(item, nextitem, reports, side_effects)
            reports[1:1] = inner_reports  # insert them after setup, as pytest logs them without ranks
        self._log_reports(item, reports, side_effects)
        if requirements.isolation is Isolation.POOLED and is_pool_spent(outcome, side_effects, reports):
            self._retire_pool(get_pool_key(requirements))
        if stop is not None:
            stop_session(stop)

    def _run_on_ranks(
        self, item: pytest.Item, nextitem: pytest.Item | None, requirements: RankRequirements, test_dir: Path
    ) -> GroupOutcome:
        """Send a test to its ranks and return how each rank ended.

        Keep the rank pool only if all of its ranks returned.
        """
        is_fresh = requirements.isolation is Isolation.FRESH
        next_index = None if is_fresh or nextitem is None else self._item_indices.get(nextitem)
        outcome = run_all_examples(
            lambda known: self._call_ranks(self._item_indices[item], next_index, requirements, test_dir, known=known),
            requirements.timeout,
        )
        if is_fresh:
            return outcome
        previous_pool = self._pools.pop(get_pool_key(requirements), None)
        if previous_pool is not None and outcome.previous_outcome is not None:
            last_item = previous_pool.last_item
            self._log_reports(last_item, make_pool_teardown_reports(last_item, outcome.previous_outcome), {})
        if all(rank.end is RankEnd.RETURNED for rank in outcome.ranks):
            self._pools[get_pool_key(requirements)] = ActivePool(requirements, item, frozenset(item.listchain()[:-1]))
        return outcome

    def _set_up_remote_fixtures(
        self, item: pytest.Item, nextitem: pytest.Item | None, requirements: RankRequirements, test_dir: Path
    ) -> list[pytest.TestReport] | None:
        """Run the remote fixtures of a test and return their reports.

        If a remote fixture fails, log the failure and return None.
        """
        remote_reports: list[pytest.TestReport] = []
        for remote in remote_fixtures.find_remote_fixtures(item):
            outcome = self._call_ranks(
                self._item_indices[item], None, remote.adapt_requirements(requirements), test_dir, remote.name
            )
            side_effects = dict(iter_side_effects(outcome))
            outcome = add_leftovers(outcome, side_effects)
            stop = find_session_stop(outcome)
            setup_reports = [] if stop is not None else remote_fixtures.make_remote_setup_reports(item, remote, outcome)
            is_failed = not setup_reports or not setup_reports[0].passed
            reports = add_local_teardown(item, nextitem, setup_reports) if is_failed else []
            self._log_reports(item, self._replay.replay(item, nextitem, reports, side_effects), side_effects)
            if stop is not None:
                stop_session(stop)
            if is_failed:
                return None
            remote_reports += setup_reports
        return remote_reports

    def _new_test_dir(self) -> Path:
        """Return the path of a directory for one test; ranks create the directory if they need it."""
        return self._base_dir / f"ranks-{next(self._test_numbers)}"

    def _call_ranks(
        self,
        index: int | None,
        next_index: int | None,
        requirements: RankRequirements,
        test_dir: Path,
        fixture: str = "",
        known: KnownExamples = NO_EXAMPLES,
    ) -> GroupOutcome:
        """Make the rank server call the test runner on every rank.

        If the server raises, return a failure of all ranks.
        """
        try:
            return self._servers[requirements.warm_engine].call(
                index,
                next_index,
                str(test_dir),
                fixture,
                *(() if known == NO_EXAMPLES else [known]),
                world_size=requirements.world_size,
                timeout=requirements.timeout,
                group=requirements.group,
                isolation=requirements.isolation,
                pool=requirements.warm_engine,
                collectives=requirements.collectives,
            )
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - a signal handler may raise any exception
            # No rank could be started, the server was killed, or a plugin such as pytest-timeout raised from a signal
            # handler; in that case the server has ended the ranks.
            self._replace_dead_server(requirements.warm_engine)
            cause = f"{type(error).__name__}: {error}"
            blank = RankOutcome(0, RankEnd.RAISED, time.monotonic_ns(), cause=cause)
            return GroupOutcome(tuple(replace(blank, rank=rank) for rank in range(requirements.world_size)), 0.0)
        finally:
            reclaim_terminal(self._terminal)
            if requirements.isolation is Isolation.FRESH:
                # Keep the directory for pooled ranks, which number their temporary directories in it until they end.
                remove_empty_dirs(test_dir)

    def _replace_dead_server(self, warm_engine: str) -> None:
        """If the rank server for ``warm_engine`` has ended, replace the server by its spare server, if one is left.

        Also forget the pools of the ended server, because their ranks ended with the server.
        """
        if self._servers[warm_engine].has_ended and warm_engine in self._spare_servers:
            self._servers[warm_engine] = self._spare_servers.pop(warm_engine)
            self._pools = {key: pool for key, pool in self._pools.items() if key[0] != warm_engine}

    def _log_reports(
        self, item: pytest.Item, reports: Iterable[pytest.TestReport], side_effects: dict[int, RankSideEffects]
    ) -> None:
        """Log ``reports``, then benchmarks and the ranks' warnings. Equal warnings of several ranks are logged once."""
        for report in reports:
            plugin_support.take_scenario(report)
            if item is self._attempted_item and type(report) is pytest.TestReport:
                self._attempt_reports.append(report)  # the plugin that runs the test again logs it
            else:
                item.ihook.pytest_runtest_logreport(report=report)
                self._replay.show_failure(item, report)
        for effects in side_effects.values():
            benchmarks.add_results(item.config, effects.benchmarks)
        for warning in dict.fromkeys(
            warning for effects in side_effects.values() for warning in effects.recorded_warnings
        ):
            replay_warning(item, warning)

    def _tear_down_pools(self, nextitem: pytest.Item | None) -> None:
        """In every rank pool, tear down the fixtures that ``nextitem`` does not need, and log teardown failures."""
        for report in self._iter_pool_teardowns(nextitem):
            if report.failed:
                self._session.ihook.pytest_runtest_logreport(report=report)

    def _iter_pool_teardowns(self, nextitem: pytest.Item | None) -> Iterator[pytest.TestReport]:
        """In every rank pool, tear down the fixtures that ``nextitem`` does not need, and yield reports of failures.

        If ``nextitem`` is None, also end the ranks of the pools.
        """
        for key, pool in list(self._pools.items()):
            if nextitem is None:
                yield from self._close_pool(key)
            elif not pool.fixture_nodes <= set(nextitem.listchain()):
                yield from self._tear_down_pool(key, nextitem)

    def _tear_down_pool(self, key: tuple[str, int], nextitem: pytest.Item | None) -> Iterator[pytest.TestReport]:
        """In one rank pool, tear down the fixtures that ``nextitem`` does not need.

        Yield failures as reports of the last test that ran in the pool.
        """
        pool = self._pools[key]
        next_index = None if nextitem is None else self._item_indices.get(nextitem)
        requirements = replace(pool.requirements, isolation=Isolation.EXISTING_POOL)  # never fork ranks for this
        outcome = self._call_ranks(None, next_index, requirements, self._new_test_dir())
        side_effects = dict(iter_side_effects(outcome))
        if outcome.previous_outcome is not None:
            yield from make_pool_teardown_reports(pool.last_item, outcome.previous_outcome)
        if any(rank.end is not RankEnd.RETURNED for rank in outcome.ranks):
            del self._pools[key]
        elif nextitem is not None:
            self._pools[key] = replace(pool, fixture_nodes=pool.fixture_nodes & set(nextitem.listchain()))
        yield from make_pool_teardown_reports(pool.last_item, add_leftovers(outcome, side_effects))

    def _close_pool(self, key: tuple[str, int]) -> Iterator[pytest.TestReport]:
        """Tear down all fixtures in a rank pool and end its ranks.

        Yield failures as reports of the last test that ran in the pool.
        """
        yield from self._tear_down_pool(key, None)
        pool = self._pools.pop(key, None)
        if pool is not None:
            warm_engine, world_size = key
            outcome = self._servers[warm_engine].close_pool(warm_engine, world_size)
            if outcome is not None:
                yield from make_pool_teardown_reports(pool.last_item, outcome)

    def _retire_pool(self, key: tuple[str, int]) -> None:
        """Close a rank pool that must not be used again, if it still exists, and log the failures of its teardown."""
        for report in self._close_pool(key) if key in self._pools else ():
            if report.failed:
                self._session.ihook.pytest_runtest_logreport(report=report)


def get_pool_key(requirements: RankRequirements) -> tuple[str, int]:
    """Return the key of a test's rank pool. Tests with equal keys run on the same ranks."""
    return requirements.warm_engine, requirements.world_size


def is_pool_spent(
    outcome: GroupOutcome, side_effects: dict[int, RankSideEffects], reports: list[pytest.TestReport]
) -> bool:
    """Return whether a rank pool must be replaced.

    A pool must be replaced if one of its ranks failed, left threads or processes behind, or changed process-wide state.
    """
    return (
        any(effects.changed_state or effects.leftovers for effects in side_effects.values())
        or any(not rank.is_successful for rank in outcome.ranks)
        or any(hasattr(report, "wasxfail") for report in reports)
    )


def make_test_environment(warm_engine: str, echo: bool) -> RankEnvironment:
    """Make the environment of a rank server that imports the engine ``warm_engine``.

    If ``warm_engine`` is empty, the server imports no engine.
    """
    if warm_engine:
        engines.require(warm_engine)
    return build_warm_up_environment(warm_engine, echo=echo)


def add_local_teardown(
    item: pytest.Item, nextitem: pytest.Item | None, reports: list[pytest.TestReport]
) -> list[pytest.TestReport]:
    """Tear down fixtures of earlier tests in the pytest process; append a report to ``reports`` if a teardown raises.

    After each test that pytest runs itself, pytest tears down the fixtures that the next test does not need. pytest
    does not run the tests on ranks, so the controller calls this function before and after those tests.
    """
    call = pytest.CallInfo.from_call(lambda: item.session._setupstate.teardown_exact(nextitem), "teardown")
    if call.excinfo is None:
        return reports
    return [*reports, pytest.TestReport.from_item_and_call(item, call)]


def get_tmp_path_base(config: pytest.Config) -> Path:
    """Return the session's base temporary directory. Raises UsageError if pytest's tmpdir plugin is disabled."""
    factory = getattr(config, "_tmp_path_factory", None)
    if factory is None:
        raise UsageError("tests on ranks need pytest's tmpdir plugin, but -p no:tmpdir disables it")
    return Path(factory.getbasetemp())


def remove_empty_dirs(test_dir: Path) -> None:
    """Remove a test's directory and those of its ranks, except directories that contain files."""
    for path in (*test_dir.glob("*"), test_dir):
        with suppress(OSError):
            path.rmdir()
