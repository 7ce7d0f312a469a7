"""The pytest process's side of tests in ranks: it sends them out, and logs one verdict for each."""

from __future__ import annotations

import pickle
import time
import warnings
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from zharness import engines
from zharness.engines.rank_environment import build_rank_environment
from zharness.errors import UsageError
from zharness.pytest_ranks import rank_coverage, remote_fixtures
from zharness.pytest_ranks.merge_reports import merge_reports
from zharness.pytest_ranks.pool_teardown import make_pool_teardown_reports
from zharness.pytest_ranks.rank_protocol import RankSideEffects, RankTestRunner, RecordedWarning, SessionStop
from zharness.pytest_ranks.rank_requirements import RankRequirements, check_item_world_sizes, get_rank_requirements
from zharness.pytest_ranks.terminal import open_terminal, reclaim_terminal
from zharness.world import GroupOutcome, Isolation, RankEnd, RankOutcome, RankServer
from zharness.world.server import RankEnvironment


@dataclass(frozen=True)
class ActivePool:
    """Ranks that live on, the last test that ran in them, and the nodes whose fixtures may stand there since."""

    requirements: RankRequirements
    last_item: pytest.Item
    fixture_nodes: frozenset[object]


class RankTestController:
    """Runs every test that has a world size on ranks, and leaves all others to pytest.

    Created after collection and before any set-up: the servers are forks of this very moment, and so their ranks hold
    every test and no fixture.
    """

    def __init__(self, session: pytest.Session) -> None:
        """Raises UsageError for markers that ask for what cannot be."""
        self._session = session
        self._item_indices = {item: at for at, item in enumerate(session.items)}
        self._test_numbers = count(1)
        self._pools: dict[tuple[str, int], ActivePool] = {}
        placements = [placed for placed in map(get_rank_requirements, session.items) if placed is not None]
        check_item_world_sizes(session.items)
        self._base_dir = get_tmp_path_base(session.config)
        self._terminal = open_terminal(session.config)
        inside = RankTestRunner(session, self._terminal, main_process_plugins=(self,))
        if hasattr(session.config, "workerinput"):
            rank_coverage.silence_worker_coverage()
        warms = sorted({placed.warm_engine for placed in placements})
        self._servers = {warm: self._make_server(warm, inside) for warm in warms}
        # Only now can a server be forked, so what takes the place of one that is killed has to be there already.
        self._spare_servers = {warm: self._make_server(warm, inside) for warm in warms}

    def _make_server(self, warm_engine: str, test_runner: RankTestRunner) -> RankServer:
        """The server of all ranks that want the imports of the engine ``warm``, or of no engine."""
        echo = self._session.config.getoption("capture") == "no"
        return RankServer(make_test_environment(warm_engine, echo), inherited_function=test_runner)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        placement = get_rank_requirements(item)
        if placement is None:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        try:
            self._run_rank_test(item, nextitem, placement)
        finally:
            item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(wrapper=True, specname="pytest_runtest_protocol")
    def pytest_settle_pools(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
        """After every test, of ranks or not: pools tear down what the next test does not need, as pytest does."""
        result = yield
        self._tear_down_pools(nextitem)
        return result

    def pytest_sessionfinish(self) -> None:
        """A session that was stopped early has pools that stand; what they raise now, nobody would see but here."""
        for report in self._iter_pool_teardowns(None):
            if report.failed:
                warnings.warn(f"{report.nodeid}: {report.longreprtext}", pytest.PytestWarning, stacklevel=1)

    def pytest_unconfigure(self) -> None:
        """End the servers."""
        for server in (*self._servers.values(), *self._spare_servers.values()):
            server.close()
        for room in self._base_dir.glob("ranks-*"):
            remove_empty_dirs(room)

    def _run_rank_test(self, item: pytest.Item, nextitem: pytest.Item | None, requirements: RankRequirements) -> None:
        """Run one test on its ranks and log what came of it."""
        room = self._new_test_dir()
        earlier = self._set_up_remote_fixtures(item, nextitem, requirements, room)
        if earlier is None:
            return
        outcome = self._run_on_ranks(item, nextitem, requirements, room)
        finished = dict(iter_side_effects(outcome))
        outcome = add_leftovers(outcome, finished)
        stop = find_session_stop(outcome)
        reports = [] if stop is not None else merge_reports(item, outcome)
        remote_fixtures.add_remote_setup(earlier, reports)
        reports = add_local_teardown(item, nextitem, reports)
        self._log_reports(item, reports, finished)
        if requirements.isolation is Isolation.POOLED and is_pool_spent(outcome, finished, reports):
            self._retire_pool(get_pool_key(requirements))
        if stop is not None:
            stop_session(stop)

    def _run_on_ranks(
        self, item: pytest.Item, nextitem: pytest.Item | None, requirements: RankRequirements, test_dir: Path
    ) -> GroupOutcome:
        """Send a test to its ranks. Pooled ranks are kept when all of them have come back."""
        if requirements.isolation is Isolation.FRESH:
            return self._call_ranks(self._item_indices[item], None, requirements, test_dir)
        following = None if nextitem is None else self._item_indices.get(nextitem)
        outcome = self._call_ranks(self._item_indices[item], following, requirements, test_dir)
        late = self._pools.pop(get_pool_key(requirements), None)
        if late is not None and outcome.previous_outcome is not None:
            self._log_reports(late.last_item, make_pool_teardown_reports(late.last_item, outcome.previous_outcome), {})
        if all(rank.end is RankEnd.RETURNED for rank in outcome.ranks):
            self._pools[get_pool_key(requirements)] = ActivePool(requirements, item, frozenset(item.listchain()[:-1]))
        return outcome

    def _set_up_remote_fixtures(
        self, item: pytest.Item, nextitem: pytest.Item | None, requirements: RankRequirements, test_dir: Path
    ) -> list[pytest.TestReport] | None:
        """Run the fixtures that run elsewhere; None when one of them did not pass, and that is logged."""
        earlier: list[pytest.TestReport] = []
        for where in remote_fixtures.find_remote_fixtures(item):
            outcome = self._call_ranks(
                self._item_indices[item], None, where.adapt_requirements(requirements), test_dir, where.name
            )
            finished = dict(iter_side_effects(outcome))
            outcome = add_leftovers(outcome, finished)
            stop = find_session_stop(outcome)
            reports = [] if stop is not None else remote_fixtures.make_remote_setup_reports(item, where, outcome)
            over = not reports or not reports[0].passed
            self._log_reports(item, add_local_teardown(item, nextitem, reports) if over else [], finished)
            if stop is not None:
                stop_session(stop)
            if over:
                return None
            earlier += reports
        return earlier

    def _new_test_dir(self) -> Path:
        return self._base_dir / f"ranks-{next(self._test_numbers)}"

    def _call_ranks(
        self,
        index: int | None,
        next_index: int | None,
        requirements: RankRequirements,
        test_dir: Path,
        fixture: str = "",
    ) -> GroupOutcome:
        try:
            return self._servers[requirements.warm_engine].call(
                index,
                next_index,
                str(test_dir),
                fixture,
                world_size=requirements.world_size,
                timeout=requirements.timeout,
                group=requirements.group,
                isolation=requirements.isolation,
                pool=requirements.warm_engine,
                collectives=requirements.collectives,
            )
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - a signal handler raises what it likes
            # No rank was started, or the server itself is gone. Or a plugin gave the test up from a signal handler, as
            # pytest-timeout does: then its ranks are ended.
            self._replace_dead_server(requirements.warm_engine)
            cause = f"{type(error).__name__}: {error}"
            blank = RankOutcome(0, RankEnd.RAISED, time.monotonic_ns(), cause=cause)
            return GroupOutcome(tuple(replace(blank, rank=rank) for rank in range(requirements.world_size)), 0.0)
        finally:
            reclaim_terminal(self._terminal)
            if requirements.isolation is Isolation.FRESH:
                remove_empty_dirs(
                    test_dir
                )  # pooled ranks number their temporary directories in it as long as they live

    def _replace_dead_server(self, warm_engine: str) -> None:
        """Have the spare take the place of a server that was killed, once; its pools went with it."""
        if self._servers[warm_engine].has_ended and warm_engine in self._spare_servers:
            self._servers[warm_engine] = self._spare_servers.pop(warm_engine)
            self._pools = {key: pool for key, pool in self._pools.items() if key[0] != warm_engine}

    def _log_reports(
        self, item: pytest.Item, reports: Iterable[pytest.TestReport], side_effects: dict[int, RankSideEffects]
    ) -> None:
        hook = item.ihook
        for rank, done in sorted(side_effects.items()):
            for data in done.inner_reports:
                report = hook.pytest_report_from_serializable(config=item.config, data=data)
                report.sections.insert(0, ("Rank", str(rank)))
                hook.pytest_runtest_logreport(report=report)
        for report in reports:
            hook.pytest_runtest_logreport(report=report)
        for warned in dict.fromkeys(warning for done in side_effects.values() for warning in done.recorded_warnings):
            replay_warning(item, warned)

    def _tear_down_pools(self, nextitem: pytest.Item | None) -> None:
        for report in self._iter_pool_teardowns(nextitem):
            if report.failed:
                self._session.ihook.pytest_runtest_logreport(report=report)

    def _iter_pool_teardowns(self, nextitem: pytest.Item | None) -> Iterator[pytest.TestReport]:
        """Tear pools down to what ``nextitem`` needs, and end them when nothing follows."""
        for key, pool in list(self._pools.items()):
            if nextitem is None:
                yield from self._close_pool(key)
            elif not pool.fixture_nodes <= set(nextitem.listchain()):
                yield from self._tear_down_pool(key, nextitem)

    def _tear_down_pool(self, key: tuple[str, int], nextitem: pytest.Item | None) -> Iterator[pytest.TestReport]:
        """Reports of what finalisers raised; they belong to the last test that the pool ran."""
        pool = self._pools[key]
        following = None if nextitem is None else self._item_indices.get(nextitem)
        living = replace(pool.requirements, isolation=Isolation.EXISTING_POOL)
        outcome = self._call_ranks(None, following, living, self._new_test_dir())
        finished = dict(iter_side_effects(outcome))
        if outcome.previous_outcome is not None:
            yield from make_pool_teardown_reports(pool.last_item, outcome.previous_outcome)
        if any(rank.end is not RankEnd.RETURNED for rank in outcome.ranks):
            del self._pools[key]
        elif nextitem is not None:
            self._pools[key] = replace(pool, fixture_nodes=pool.fixture_nodes & set(nextitem.listchain()))
        yield from make_pool_teardown_reports(pool.last_item, add_leftovers(outcome, finished))

    def _close_pool(self, key: tuple[str, int]) -> Iterator[pytest.TestReport]:
        """Tear everything in a pool down and end its ranks, judging how they end."""
        yield from self._tear_down_pool(key, None)
        pool = self._pools.pop(key, None)
        if pool is not None:
            warm, world_size = key
            outcome = self._servers[warm].close_pool(warm, world_size)
            if outcome is not None:
                yield from make_pool_teardown_reports(pool.last_item, outcome)

    def _retire_pool(self, key: tuple[str, int]) -> None:
        """End a pool, if it is not gone already."""
        for report in self._close_pool(key) if key in self._pools else ():
            if report.failed:
                self._session.ihook.pytest_runtest_logreport(report=report)


def get_pool_key(requirements: RankRequirements) -> tuple[str, int]:
    """Tests of one key share their ranks where these live on."""
    return requirements.warm_engine, requirements.world_size


def is_pool_spent(
    outcome: GroupOutcome, side_effects: dict[int, RankSideEffects], reports: list[pytest.TestReport]
) -> bool:
    """Whether ranks are not to be used again: something failed, was left behind or stayed changed in one of them."""
    return (
        any(done.changed_state or done.leftovers for done in side_effects.values())
        or any(not rank.is_successful for rank in outcome.ranks)
        or any(hasattr(report, "wasxfail") for report in reports)
    )


def make_test_environment(warm_engine: str, echo: bool) -> RankEnvironment:
    """What the server of these ranks needs: the engine's imports, if one is named."""
    if warm_engine:
        engines.require(warm_engine)
    return build_rank_environment(warm_engine, echo=echo)


def iter_side_effects(outcome: GroupOutcome) -> Iterator[tuple[int, RankSideEffects]]:
    """What every rank that returned has returned."""
    for rank in outcome.ranks:
        if rank.end is RankEnd.RETURNED and rank.payload:
            yield rank.rank, rank.value


def add_leftovers(outcome: GroupOutcome, side_effects: dict[int, RankSideEffects]) -> GroupOutcome:
    """The outcome, with what each rank says that it left behind."""
    return replace(
        outcome,
        ranks=tuple(
            replace(rank, leftovers=side_effects[rank.rank].leftovers) if rank.rank in side_effects else rank
            for rank in outcome.ranks
        ),
    )


def find_session_stop(outcome: GroupOutcome) -> SessionStop | None:
    """The first rank's wish to end the session, if there is one."""
    notes = sorted((note for rank in outcome.ranks for note in rank.notes), key=lambda note: note.at_ns)
    told: Iterator[Any] = (pickle.loads(note.payload) for note in notes)  # noqa: S301 - written by our own ranks
    return next((what for what in told if isinstance(what, SessionStop)), None)


def stop_session(stop: SessionStop) -> None:
    """End the session as the test would have ended it in this process."""
    if stop.trigger == "keyboard":
        raise KeyboardInterrupt(f"rank {stop.rank}: {stop.reason}")
    pytest.exit(f"rank {stop.rank}: {stop.reason}", returncode=stop.returncode)


def add_local_teardown(
    item: pytest.Item, nextitem: pytest.Item | None, reports: list[pytest.TestReport]
) -> list[pytest.TestReport]:
    """The reports, and what tearing down in this process raised: fixtures that tests outside of ranks have set up.

    pytest tears down to the next test after every test; here the test ran elsewhere, so that is left to do.
    """
    call = pytest.CallInfo.from_call(lambda: item.session._setupstate.teardown_exact(nextitem), "teardown")
    if call.excinfo is None:
        return reports
    return [*reports, pytest.TestReport.from_item_and_call(item, call)]


def replay_warning(item: pytest.Item, warning: RecordedWarning) -> None:
    """Have a warning of a rank recorded as one of this process."""
    message = warnings.WarningMessage(
        warning.category(warning.message), warning.category, warning.filename, warning.line
    )
    kwargs = {"warning_message": message, "nodeid": item.nodeid, "when": warning.when, "location": warning.location}
    item.ihook.pytest_warning_recorded.call_historic(kwargs=kwargs)


def get_tmp_path_base(config: pytest.Config) -> Path:
    """The session's base directory of temporary paths, which pytest makes private and removes in time."""
    factory = getattr(config, "_tmp_path_factory", None)
    if factory is None:
        raise UsageError("tests in ranks need pytest's tmpdir plugin; it was switched off by -p no:tmpdir")
    return Path(factory.getbasetemp())


def remove_empty_dirs(test_dir: Path) -> None:
    """Remove the directories of a test that wrote nothing into them."""
    for path in (*test_dir.glob("*"), test_dir):
        with suppress(OSError):
            path.rmdir()
