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
from zharness.errors import UsageError
from zharness.items import elsewhere, measured
from zharness.items.inside import Finished, Inside, Stop, Warned
from zharness.items.joint import joint_reports
from zharness.items.late import torn_down
from zharness.items.placement import Placement, check_all, placement_of
from zharness.items.terminal import reclaim, terminal_of
from zharness.world import End, GroupOutcome, Isolation, RankOutcome, RankServer
from zharness.world.server import Surroundings


@dataclass(frozen=True)
class PoolInUse:
    """Ranks that live on, the last test that ran in them, and the nodes whose fixtures may stand there since."""

    placement: Placement
    last: pytest.Item
    standing: frozenset[object]


class Conductor:
    """Runs every test that has a world size on ranks, and leaves all others to pytest.

    Created after collection and before any set-up: the servers are forks of this very moment, and so their ranks hold
    every test and no fixture.
    """

    def __init__(self, session: pytest.Session) -> None:
        """Raises UsageError for markers that ask for what cannot be."""
        self._session = session
        self._index = {item: at for at, item in enumerate(session.items)}
        self._serials = count(1)
        self._pools: dict[tuple[str, int], PoolInUse] = {}
        placements = [placed for placed in map(placement_of, session.items) if placed is not None]
        check_all(session.items)
        self._base = base_of_tmp_path(session.config)
        self._terminal = terminal_of(session.config)
        inside = Inside(session, self._terminal, ours=(self,))
        if hasattr(session.config, "workerinput"):
            measured.expect_little()
        warms = sorted({placed.warm for placed in placements})
        self._servers = {warm: self._server(warm, inside) for warm in warms}
        # Only now can a server be forked, so what takes the place of one that is killed has to be there already.
        self._spares = {warm: self._server(warm, inside) for warm in warms}

    def _server(self, warm: str, inside: Inside) -> RankServer:
        """The server of all ranks that want the imports of the engine ``warm``, or of no engine."""
        echo = self._session.config.getoption("capture") == "no"
        return RankServer(surroundings(warm, echo), inherited=inside)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        placement = placement_of(item)
        if placement is None:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        try:
            self._conduct(item, nextitem, placement)
        finally:
            item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(wrapper=True, specname="pytest_runtest_protocol")
    def pytest_settle_pools(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
        """After every test, of ranks or not: pools tear down what the next test does not need, as pytest does."""
        result = yield
        self._settle(nextitem)
        return result

    def pytest_sessionfinish(self) -> None:
        """A session that was stopped early has pools that stand; what they raise now, nobody would see but here."""
        for report in self._settled(None):
            if report.failed:
                warnings.warn(f"{report.nodeid}: {report.longreprtext}", pytest.PytestWarning, stacklevel=1)

    def pytest_unconfigure(self) -> None:
        """End the servers."""
        for server in (*self._servers.values(), *self._spares.values()):
            server.close()
        for room in self._base.glob("ranks-*"):
            remove_empty(room)

    def _conduct(self, item: pytest.Item, nextitem: pytest.Item | None, placement: Placement) -> None:
        """Run one test on its ranks and log what came of it."""
        room = self._new_room()
        earlier = self._set_up_elsewhere(item, nextitem, placement, room)
        if earlier is None:
            return
        outcome = self._run(item, nextitem, placement, room)
        finished = dict(finished_of(outcome))
        outcome = with_leftovers(outcome, finished)
        stop = stop_of(outcome)
        reports = [] if stop is not None else joint_reports(item, outcome)
        elsewhere.added(earlier, reports)
        reports = with_own_teardown(item, nextitem, reports)
        self._log(item, reports, finished)
        if placement.isolation is Isolation.POOLED and is_spent(outcome, finished, reports):
            self._retire(pool_key(placement))
        if stop is not None:
            obey(stop)

    def _run(self, item: pytest.Item, nextitem: pytest.Item | None, placement: Placement, room: Path) -> GroupOutcome:
        """Send a test to its ranks. Pooled ranks are kept when all of them have come back."""
        if placement.isolation is Isolation.FRESH:
            return self._sent(self._index[item], None, placement, room)
        following = None if nextitem is None else self._index.get(nextitem)
        outcome = self._sent(self._index[item], following, placement, room)
        late = self._pools.pop(pool_key(placement), None)
        if late is not None and outcome.before is not None:
            self._log(late.last, torn_down(late.last, outcome.before), {})
        if all(rank.end is End.RETURNED for rank in outcome.ranks):
            self._pools[pool_key(placement)] = PoolInUse(placement, item, frozenset(item.listchain()[:-1]))
        return outcome

    def _set_up_elsewhere(
        self, item: pytest.Item, nextitem: pytest.Item | None, placement: Placement, room: Path
    ) -> list[pytest.TestReport] | None:
        """Run the fixtures that run elsewhere; None when one of them did not pass, and that is logged."""
        earlier: list[pytest.TestReport] = []
        for where in elsewhere.wanted_by(item):
            outcome = self._sent(self._index[item], None, where.placed(placement), room, where.name)
            finished = dict(finished_of(outcome))
            outcome = with_leftovers(outcome, finished)
            stop = stop_of(outcome)
            reports = [] if stop is not None else elsewhere.judged(item, where, outcome)
            over = not reports or not reports[0].passed
            self._log(item, with_own_teardown(item, nextitem, reports) if over else [], finished)
            if stop is not None:
                obey(stop)
            if over:
                return None
            earlier += reports
        return earlier

    def _new_room(self) -> Path:
        return self._base / f"ranks-{next(self._serials)}"

    def _sent(
        self, index: int | None, following: int | None, placement: Placement, room: Path, fixture: str = ""
    ) -> GroupOutcome:
        try:
            return self._servers[placement.warm].call(
                index,
                following,
                str(room),
                fixture,
                world_size=placement.world_size,
                timeout=placement.timeout,
                group=placement.group,
                isolation=placement.isolation,
                pool=placement.warm,
                collectives=placement.collectives,
            )
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - a signal handler raises what it likes
            # No rank was started, or the server itself is gone. Or a plugin gave the test up from a signal handler, as
            # pytest-timeout does: then its ranks are ended.
            self._replace_if_gone(placement.warm)
            cause = f"{type(error).__name__}: {error}"
            blank = RankOutcome(0, End.RAISED, time.monotonic_ns(), cause=cause)
            return GroupOutcome(tuple(replace(blank, rank=rank) for rank in range(placement.world_size)), 0.0)
        finally:
            reclaim(self._terminal)
            if placement.isolation is Isolation.FRESH:
                remove_empty(room)  # pooled ranks number their temporary directories in it as long as they live

    def _replace_if_gone(self, warm: str) -> None:
        """Have the spare take the place of a server that was killed, once; its pools went with it."""
        if self._servers[warm].ended and warm in self._spares:
            self._servers[warm] = self._spares.pop(warm)
            self._pools = {key: pool for key, pool in self._pools.items() if key[0] != warm}

    def _log(self, item: pytest.Item, reports: Iterable[pytest.TestReport], finished: dict[int, Finished]) -> None:
        hook = item.ihook
        for rank, done in sorted(finished.items()):
            for data in done.inner:
                report = hook.pytest_report_from_serializable(config=item.config, data=data)
                report.sections.insert(0, ("Rank", str(rank)))
                hook.pytest_runtest_logreport(report=report)
        for report in reports:
            hook.pytest_runtest_logreport(report=report)
        for warned in dict.fromkeys(warning for done in finished.values() for warning in done.warned):
            pass_on(item, warned)

    def _settle(self, nextitem: pytest.Item | None) -> None:
        for report in self._settled(nextitem):
            if report.failed:
                self._session.ihook.pytest_runtest_logreport(report=report)

    def _settled(self, nextitem: pytest.Item | None) -> Iterator[pytest.TestReport]:
        """Tear pools down to what ``nextitem`` needs, and end them when nothing follows."""
        for key, pool in list(self._pools.items()):
            if nextitem is None:
                yield from self._retired(key)
            elif not pool.standing <= set(nextitem.listchain()):
                yield from self._torn_down(key, nextitem)

    def _torn_down(self, key: tuple[str, int], nextitem: pytest.Item | None) -> Iterator[pytest.TestReport]:
        """Reports of what finalisers raised; they belong to the last test that the pool ran."""
        pool = self._pools[key]
        following = None if nextitem is None else self._index.get(nextitem)
        living = replace(pool.placement, isolation=Isolation.LIVING)
        outcome = self._sent(None, following, living, self._new_room())
        finished = dict(finished_of(outcome))
        if outcome.before is not None:
            yield from torn_down(pool.last, outcome.before)
        if any(rank.end is not End.RETURNED for rank in outcome.ranks):
            del self._pools[key]
        elif nextitem is not None:
            self._pools[key] = replace(pool, standing=pool.standing & set(nextitem.listchain()))
        yield from torn_down(pool.last, with_leftovers(outcome, finished))

    def _retired(self, key: tuple[str, int]) -> Iterator[pytest.TestReport]:
        """Tear everything in a pool down and end its ranks, judging how they end."""
        yield from self._torn_down(key, None)
        pool = self._pools.pop(key, None)
        if pool is not None:
            warm, world_size = key
            outcome = self._servers[warm].dismiss(warm, world_size)
            if outcome is not None:
                yield from torn_down(pool.last, outcome)

    def _retire(self, key: tuple[str, int]) -> None:
        """End a pool, if it is not gone already."""
        for report in self._retired(key) if key in self._pools else ():
            if report.failed:
                self._session.ihook.pytest_runtest_logreport(report=report)


def pool_key(placement: Placement) -> tuple[str, int]:
    """Tests of one key share their ranks where these live on."""
    return placement.warm, placement.world_size


def is_spent(outcome: GroupOutcome, finished: dict[int, Finished], reports: list[pytest.TestReport]) -> bool:
    """Whether ranks are not to be used again: something failed, was left behind or stayed changed in one of them."""
    return (
        any(done.changed or done.left_behind for done in finished.values())
        or any(not rank.sound for rank in outcome.ranks)
        or any(hasattr(report, "wasxfail") for report in reports)
    )


def surroundings(warm: str, echo: bool) -> Surroundings:
    """What the server of these ranks needs: the engine's imports, if one is named."""
    return Surroundings(warm_up=engines.require(warm).warm_up if warm else "", echo=echo)


def finished_of(outcome: GroupOutcome) -> Iterator[tuple[int, Finished]]:
    """What every rank that returned has returned."""
    for rank in outcome.ranks:
        if rank.end is End.RETURNED and rank.payload:
            yield rank.rank, rank.value


def with_leftovers(outcome: GroupOutcome, finished: dict[int, Finished]) -> GroupOutcome:
    """The outcome, with what each rank says that it left behind."""
    return replace(
        outcome,
        ranks=tuple(
            replace(rank, left_behind=finished[rank.rank].left_behind) if rank.rank in finished else rank
            for rank in outcome.ranks
        ),
    )


def stop_of(outcome: GroupOutcome) -> Stop | None:
    """The first rank's wish to end the session, if there is one."""
    notes = sorted((note for rank in outcome.ranks for note in rank.notes), key=lambda note: note.at_ns)
    told: Iterator[Any] = (pickle.loads(note.payload) for note in notes)  # noqa: S301 - written by our own ranks
    return next((what for what in told if isinstance(what, Stop)), None)


def obey(stop: Stop) -> None:
    """End the session as the test would have ended it in this process."""
    if stop.interrupt == "keyboard":
        raise KeyboardInterrupt(f"rank {stop.rank}: {stop.reason}")
    pytest.exit(f"rank {stop.rank}: {stop.reason}", returncode=stop.status)


def with_own_teardown(
    item: pytest.Item, nextitem: pytest.Item | None, reports: list[pytest.TestReport]
) -> list[pytest.TestReport]:
    """The reports, and what tearing down in this process raised: fixtures that tests outside of ranks have set up.

    pytest tears down to the next test after every test; here the test ran elsewhere, so that is left to do.
    """
    call = pytest.CallInfo.from_call(lambda: item.session._setupstate.teardown_exact(nextitem), "teardown")
    if call.excinfo is None:
        return reports
    return [*reports, pytest.TestReport.from_item_and_call(item, call)]


def pass_on(item: pytest.Item, warned: Warned) -> None:
    """Have a warning of a rank recorded as one of this process."""
    message = warnings.WarningMessage(warned.category(warned.message), warned.category, warned.filename, warned.line)
    kwargs = {"warning_message": message, "nodeid": item.nodeid, "when": warned.when, "location": warned.location}
    item.ihook.pytest_warning_recorded.call_historic(kwargs=kwargs)


def base_of_tmp_path(config: pytest.Config) -> Path:
    """The session's base directory of temporary paths, which pytest makes private and removes in time."""
    factory = getattr(config, "_tmp_path_factory", None)
    if factory is None:
        raise UsageError("tests in ranks need pytest's tmpdir plugin; it was switched off by -p no:tmpdir")
    return Path(factory.getbasetemp())


def remove_empty(room: Path) -> None:
    """Remove the directories of a test that wrote nothing into them."""
    for path in (*room.glob("*"), room):
        with suppress(OSError):
            path.rmdir()
