"""Tests in ranks that torchrun started: rank 0 conducts and reports, the other processes are its ranks.

[Note: pytest under torchrun]
``torchrun ... -m pytest`` runs the same command in every process. Where tests in ranks or cells are collected, the
plugin attaches: the pytest of rank 0 goes on as the only one that anybody sees, with a conductor whose ranks are the
launch's (``world/leader.py``), and that of every other rank runs what it is told. A test of fewer ranks than were
launched runs on the first of them, one of more is deselected, one without a world size runs on rank 0 alone. The ranks
live on, and fixtures of every scope are set up for each test anew: they could not outlive a change of the world size.
Where nothing of ours is collected, every process runs pytest as if this plugin were not there.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol  # as in inside.py

from zharness.errors import UsageError
from zharness.items.attached_quiet import Hush, captured_in, own_temporary_paths, write_nothing
from zharness.items.conductor import Conductor, finished_of
from zharness.items.facts import told_in
from zharness.items.inside import BASE, Finished, Inside, Teller
from zharness.items.joint import joint_reports
from zharness.items.placement import Placement, placement_of, world_size_of
from zharness.items.terminal import Terminal
from zharness.world import GroupOutcome, Isolation, RankServer, here
from zharness.world.attachment import Follower
from zharness.world.launched import Launch, launched
from zharness.world.leader import CUT_OFF, Leader
from zharness.world.messages import Standing
from zharness.world.outcome import End, Printed, RankOutcome
from zharness.world.store import StoreChannel
from zharness.world.work import Group

NAME = "zharness-attached"


def arrive(config: pytest.Config) -> None:
    """Register the plugin if torchrun has made this process a rank, and if it runs the tests itself."""
    divided = getattr(config.option, "dist", "no") != "no" or hasattr(config, "workerinput")
    launch = None if divided or config.option.collectonly else launched()
    if launch is not None:
        config.pluginmanager.register(Attached(config, launch), NAME)


def attached(config: pytest.Config) -> Attached | None:
    """The plugin, once it is attached."""
    plugin: Attached | None = config.pluginmanager.getplugin(NAME)
    return plugin if plugin is not None and plugin.engaged else None


@dataclass(frozen=True)
class Question:
    """What rank 0 asks every other: whether it has these tests, and sees this file."""

    nodeids: tuple[str, ...]
    file: str


@dataclass(frozen=True)
class Answer:
    """Which tests a rank lacks, why it may be so, and whether it sees the file of rank 0."""

    missing: tuple[str, ...]
    errors: tuple[str, ...]
    sees: bool


class Attached:
    """The plugin of one process of the launch."""

    def __init__(self, config: pytest.Config, launch: Launch) -> None:
        self.engaged = False
        self.leader: Leader | None = None
        self._config = config
        self._launch = launch
        self._hush = Hush(config)
        self._follower: Follower | None = None
        self._conductor: AttachedConductor | None = None
        self._collected: dict[str, pytest.Item] = {}
        self._errors: list[str] = []
        self._deselected: list[str] = []
        self._status = 0
        self._running = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        if self._launch.rank:
            self._hush.begin()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._errors.append(f"{report.nodeid}: {report.longreprtext}")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, object, object]:
        """All tests are remembered: what one process deselects, by its own cache say, rank 0 may want of it."""
        self._collected = {item.nodeid: item for item in items}
        result = yield
        try:
            self.engaged = any(size_of(item) is not None for item in self._collected.values())
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None
        if self.engaged:
            self._deselect(items)
        return result

    def _deselect(self, items: list[pytest.Item]) -> None:
        out = [item for item in items if (size_of(item) or 1) > self._launch.world_size]
        if out:
            items[:] = [item for item in items if item not in out]
            self._config.hook.pytest_deselected(items=out)
            self._deselected = [f"{item.nodeid} (world size {size_of(item)})" for item in out]

    def pytest_report_collectionfinish(self) -> list[str]:
        if not self.engaged:
            return []
        lines = [
            f"attached to {self._launch.describe()}: they live on, and fixtures of every scope are set up for each "
            "test anew, whatever --isolation says"
        ]
        if self._deselected:
            lines.append(f"deselected, launched with {self._launch.world_size} ranks: {', '.join(self._deselected)}")
        return lines

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if not self.engaged:
            self._hush.end()
            return
        inside = Performer(session)
        captured = captured_in(self._config)
        if self._launch.rank:
            self._hush.stay()
            write_nothing(self._config)
            own_temporary_paths(self._config, self._launch.rank)
            self._follower = Follower(self._launch, inside, captured)
            self._follower.meet(lambda question: self._answer(session, question))
            return
        self.leader = Leader(self._launch, self._last_words, inside, captured)
        try:
            self._conductor = AttachedConductor(session, self.leader)
            self._config.pluginmanager.register(self._conductor, "zharness-conductor")
            self._conductor.assemble()
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None

    def _answer(self, session: pytest.Session, question: Question) -> Answer:
        """Have rank 0's tests in rank 0's order, as it names them by number."""
        session.items[:] = [self._collected[name] for name in question.nodeids if name in self._collected]
        missing = tuple(name for name in question.nodeids if name not in self._collected)
        return Answer(missing, tuple(self._errors), Path(question.file).exists())

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> bool | None:
        if self._follower is None:
            return None
        self._status = self._follower.follow()
        return True

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running = nodeid

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._follower is not None:
            session.exitstatus = self._status
        if self.leader is not None:
            self.leader.disarm()

    @pytest.hookimpl(trylast=True, specname="pytest_sessionfinish")
    def pytest_tell_status(self, session: pytest.Session) -> None:
        if self.leader is not None:
            self.leader.status = int(session.exitstatus)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        if self.leader is not None:
            self.leader.close()

    def _last_words(self, outcome: GroupOutcome | None, words: str) -> int:
        """The report as it stands, with the test that ran. What is set up is not torn down: that could hang as well."""
        config = self._config
        capture = config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            capture.suspend(in_=True)
            if capture.is_globally_capturing():
                capture.read_global_capture()  # the witness has it; unread, it would be printed in the end
        assert self._conductor is not None, "nothing runs before there is a conductor"
        session = self._conductor.session
        if outcome is not None:
            self._conductor.log_last(outcome, words)
        elif self._running:
            words = f"{words} ({self._running} was running on rank 0)"
        session.shouldfail = words
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        session._setupstate.stack.clear()
        config.hook.pytest_sessionfinish(session=session, exitstatus=session.exitstatus)
        config._ensure_unconfigure()
        return int(session.exitstatus)


class AttachedConductor(Conductor):
    """A conductor whose ranks are the launch's, this very process among them."""

    def __init__(self, session: pytest.Session, leader: Leader) -> None:
        self.session = session
        self._leader = leader
        self._conducted: pytest.Item | None = None
        self._alone: pytest.Item | None = None
        self._apart = False  # whether the ranks have no file system in common
        super().__init__(session)

    def _server(self, warm: str, inside: Inside) -> RankServer:
        return self._leader

    def assemble(self) -> None:
        """See to it that every rank has every test. Raises UsageError that names the rank, and what it lacks."""
        file = self._base / "attached"
        file.touch()
        question = Question(tuple(item.nodeid for item in self.session.items), str(file))
        answers: dict[int, Answer] = self._leader.meet(question)
        file.unlink()
        self._apart = not all(answer.sees for answer in answers.values())
        lacking = next(((rank, answer) for rank, answer in answers.items() if answer.missing), None)
        if lacking is not None:
            rank, answer = lacking
            why = "\n".join(answer.errors) or "every rank has to see the same files and the same options"
            raise UsageError(f"rank {rank} did not collect {', '.join(answer.missing)}, as rank 0 did; {why}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        self._leader.title = item.nodeid
        if placement_of(item) is not None:
            return super().pytest_runtest_protocol(item, nextitem)
        self._alone = item
        if nextitem is None or placement_of(nextitem) is None:
            return None
        return self._by_itself(item)  # the next one runs in this process too, as rank 0, and must find nothing set up

    def _by_itself(self, item: pytest.Item) -> bool:
        """Run a test in this process, with everything torn down behind it."""
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        runtestprotocol(item, nextitem=None)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _conduct(self, item: pytest.Item, nextitem: pytest.Item | None, placement: Placement) -> None:
        if self._apart and "shared_tmp_path" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip("shared_tmp_path: the machines of this launch share no file system"))
            runtestprotocol(item, nextitem=None)
            return
        group = Group.NONE if placement.group is Group.NONE else Group.DEFAULT
        self._conducted = item
        super()._conduct(item, nextitem, replace(placement, isolation=Isolation.FRESH, group=group))
        self._conducted = None

    def _sent(
        self, index: int | None, following: int | None, placement: Placement, room: Path, fixture: str = ""
    ) -> GroupOutcome:
        outcome = super()._sent(index, following, placement, room, fixture)
        return with_stopped(outcome) if self._leader.hung_up else outcome

    def _log(self, item: pytest.Item, reports: Iterable[pytest.TestReport], finished: dict[int, Finished]) -> None:
        """What rank 0 itself warned of and logged within the test, this process has recorded when it came about."""
        own = finished.get(0, Finished())
        rest = {
            rank: replace(done, warned=tuple(one for one in done.warned if one not in own.warned))
            for rank, done in finished.items()
            if rank
        }
        super()._log(item, reports, rest)

    def log_last(self, outcome: GroupOutcome, words: str) -> None:
        """Log the test during which a rank was lost."""
        if self._conducted is not None:
            item = self._conducted
            self._log(item, joint_reports(item, with_stopped(outcome)), dict(finished_of(outcome)))
        elif self._alone is not None:  # a test on rank 0 that had sent out a cell
            item = self._alone
            text = f"{words}\n\n{outcome.describe()}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
            item.ihook.pytest_runtest_logreport(report=report)


class Performer:
    """Runs a test's part in this process, which is a rank for that long."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._teller: Teller | None = None
        self._inside: Inside | None = None

    def __call__(self, index: int, following: int | None, room: str, fixture: str = "") -> Finished:
        config, channel = self._session.config, here().channel
        assert isinstance(channel, StoreChannel), "only a rank of a launch performs"
        if self._teller is None or self._inside is None:
            self._teller = Teller(config, channel)
            refused = Terminal(-1, refusal="torchrun's ranks have no terminal")
            self._inside = Inside(self._session, refused, (), self._teller)
        self._teller.channel = channel
        config.stash[BASE] = Path(room).parent
        item: Any = self._session.items[index]
        # A fixture that runs elsewhere has the item changed, in ranks that were to end with it.
        names, setup_only = list(getattr(item, "fixturenames", ())), config.option.setuponly
        config.pluginmanager.register(self._teller, "zharness-teller")
        self._teller.warned.clear()  # pytest tells a new plugin of all warnings that there were
        try:
            return self._inside(index, following, room, fixture)
        finally:
            config.pluginmanager.unregister(self._teller)
            config.option.setuponly = setup_only
            if names:
                item.fixturenames[:] = names


def with_stopped(outcome: GroupOutcome) -> GroupOutcome:
    """The outcome, with ranks as stopped that failed because a peer had hung up on them, or had died."""
    return replace(outcome, ranks=tuple(map(stopped, outcome.ranks)))


def stopped(rank: RankOutcome) -> RankOutcome:
    """A rank without the failure that only says that a peer was gone; what it had printed until then is kept."""
    for note in rank.notes:
        told = told_in(note)
        if told is None or note.standing is not Standing.FAILED or not any(one in str(told.report) for one in CUT_OFF):
            continue
        notes = tuple(other for other in rank.notes if other is not note)
        printed = [
            Printed(told.phase, stream, text)
            for title, text in told.report["sections"]
            for stream in ("stdout", "stderr")
            if title == f"Captured {stream} {told.phase}"
        ]
        end = End.STOPPED if rank.end is End.RETURNED else rank.end
        return replace(
            rank, end=end, at_ns=note.at_ns, notes=notes, phase=told.phase, printed=(*rank.printed, *printed)
        )
    return rank


def size_of(item: pytest.Item) -> int | None:
    """The world size of a test in ranks, or of a test's cell; None for any other."""
    cell = getattr(getattr(item, "callspec", None), "params", {}).get("cell")
    size: int | None = getattr(getattr(cell, "case", None), "world_size", None)
    return world_size_of(item) if size is None else size
