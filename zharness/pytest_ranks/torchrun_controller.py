"""Run tests on the ranks that torchrun started: the controller on rank 0, and the test runner on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol  # as in rank_protocol.py

from zharness.errors import UsageError
from zharness.pytest_ranks.controller import RankTestController
from zharness.pytest_ranks.inner_reports import merge_inner_reports
from zharness.pytest_ranks.known_examples import NO_EXAMPLES, KnownExamples
from zharness.pytest_ranks.listeners import restore_listeners, silence_listeners
from zharness.pytest_ranks.merge_reports import merge_reports
from zharness.pytest_ranks.rank_problems import load_phase_report
from zharness.pytest_ranks.rank_protocol import RANKS_BASE_DIR, REPORTER_NAME, PhaseReporter, RankTestRunner
from zharness.pytest_ranks.rank_requirements import RankRequirements, get_rank_requirements
from zharness.pytest_ranks.side_effects import RankSideEffects, iter_side_effects
from zharness.pytest_ranks.terminal import Terminal
from zharness.world import GroupOutcome, Isolation, RankServer, current_rank
from zharness.world.leader import Leader
from zharness.world.messages import RankStatus
from zharness.world.outcome import CapturedOutput, RankEnd, RankOutcome
from zharness.world.process_group import PEER_LOST_MESSAGES
from zharness.world.store import StoreChannel
from zharness.world.task import GroupMode


@dataclass(frozen=True)
class CollectionQuery:
    """Query from rank 0 to every other rank: did the rank collect the tests ``nodeids``, and does it see ``file``?"""

    nodeids: tuple[str, ...]
    file: str


@dataclass(frozen=True)
class CollectionReply:
    """Reply to a CollectionQuery: the tests that a rank lacks, its collection errors, and whether the file exists."""

    missing_nodeids: tuple[str, ...]
    collection_errors: tuple[str, ...]
    sees_file: bool


class TorchrunTestController(RankTestController):
    """Controller that runs tests on the processes of the launch; this process is rank 0 of each test."""

    def __init__(self, session: pytest.Session, leader: Leader) -> None:
        self.session = session
        self._leader = leader
        self._current_item: pytest.Item | None = None
        self._local_item: pytest.Item | None = None
        self._lacks_shared_filesystem = False
        super().__init__(session)

    def _make_server(self, warm_engine: str, test_runner: RankTestRunner) -> RankServer:
        """Return the leader, which runs all tests. It forks no ranks, so ``warm_engine`` is not imported in advance."""
        return self._leader

    def verify_collection(self) -> None:
        """Raise UsageError if any rank did not collect every test. The message names the rank and the missing tests."""
        file = self._base_dir / "attached"
        file.touch()
        query = CollectionQuery(tuple(item.nodeid for item in self.session.items), str(file))
        replies: dict[int, CollectionReply] = self._leader.ask_followers(query)
        file.unlink()
        self._lacks_shared_filesystem = not all(reply.sees_file for reply in replies.values())
        for rank, reply in replies.items():
            if reply.missing_nodeids:
                reason = "\n".join(reply.collection_errors) or "every rank needs the same files and the same options"
                raise UsageError(
                    f"rank {rank} did not collect {', '.join(reply.missing_nodeids)}, but rank 0 did; {reason}"
                )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Run a test with a world size on the launched ranks, and any other test in this process only."""
        self._leader.task_title = item.nodeid
        if get_rank_requirements(item) is not None:
            return super().pytest_runtest_protocol(item, nextitem)
        self._local_item = item
        if nextitem is None or get_rank_requirements(nextitem) is None:
            return None
        return self._run_locally(item)  # this process is rank 0 of the next test, which needs all fixtures torn down

    def _run_locally(self, item: pytest.Item) -> bool:
        """Run a test in this process and tear down fixtures of all scopes after it."""
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        runtestprotocol(item, nextitem=None)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _run_rank_test(self, item: pytest.Item, nextitem: pytest.Item | None, requirements: RankRequirements) -> None:
        """Run one test on the launched ranks; skip the test if it needs files that the machines do not share."""
        if self._lacks_shared_filesystem and "shared_tmp_path" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip("shared_tmp_path: the machines of this launch share no file system"))
            runtestprotocol(item, nextitem=None)
            return
        group = GroupMode.NONE if requirements.group is GroupMode.NONE else GroupMode.DEFAULT
        self._current_item = item
        super()._run_rank_test(item, nextitem, replace(requirements, isolation=Isolation.FRESH, group=group))
        self._current_item = None

    def _call_ranks(
        self,
        index: int | None,
        next_index: int | None,
        requirements: RankRequirements,
        test_dir: Path,
        fixture: str = "",
        known: KnownExamples = NO_EXAMPLES,
    ) -> GroupOutcome:
        """Run the test on the ranks. If a rank failed only because another rank was lost, change its end to STOPPED."""
        outcome = super()._call_ranks(index, next_index, requirements, test_dir, fixture, known)
        return mark_cut_off_ranks(outcome) if self._leader.is_group_broken else outcome

    def _log_reports(
        self, item: pytest.Item, reports: Iterable[pytest.TestReport], side_effects: dict[int, RankSideEffects]
    ) -> None:
        """Log reports without the warnings of rank 0, because pytest in this process has recorded them already."""
        logged = side_effects.get(0, RankSideEffects()).recorded_warnings
        new_effects = {
            rank: replace(
                effects,
                recorded_warnings=tuple(warning for warning in effects.recorded_warnings if warning not in logged),
            )
            for rank, effects in side_effects.items()
        }
        super()._log_reports(item, reports, new_effects)

    def log_lost_test(self, outcome: GroupOutcome, message: str) -> None:
        """Log a failure of the test that was running when a rank was lost."""
        restore_listeners()  # the main thread may hang in a test
        if self.session.config.pluginmanager.hasplugin(REPORTER_NAME):
            self.session.config.pluginmanager.unregister(name=REPORTER_NAME)  # it would send the report to rank 0
        if self._current_item is not None:
            item = self._current_item
            reports = [*merge_inner_reports(item, outcome), *merge_reports(item, mark_cut_off_ranks(outcome))]
            self._log_reports(item, reports, dict(iter_side_effects(outcome)))
        elif self._local_item is not None:  # a test on rank 0 that was running a cell on the ranks
            item = self._local_item
            text = f"{message}\n\n{outcome.describe()}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
            item.ihook.pytest_runtest_logreport(report=report)


class TorchrunTestRunner:
    """Runs the tests that rank 0 sends; this process acts as a rank while a test runs."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._reporter: PhaseReporter | None = None
        self._test_runner: RankTestRunner | None = None

    def __call__(self, index: int, next_index: int | None, test_dir: str, fixture: str = "") -> RankSideEffects:
        """Run the item at ``index`` as ``RankTestRunner`` does, and restore the plugins and the item afterwards."""
        config, channel = self._session.config, current_rank().channel
        assert isinstance(channel, StoreChannel), "only ranks of a torchrun launch use this runner"
        if self._reporter is None or self._test_runner is None:
            self._reporter = PhaseReporter(config, channel)
            no_terminal = Terminal(-1, unavailable_reason="ranks of torchrun have no terminal")
            self._test_runner = RankTestRunner(self._session, no_terminal, (), self._reporter)
        self._reporter.channel = channel
        config.stash[RANKS_BASE_DIR] = Path(test_dir).parent
        item: Any = self._session.items[index]
        # Running a remote fixture modifies the item. Forked ranks end afterwards, but this process has to restore it.
        fixture_names, setuponly = list(getattr(item, "fixturenames", ())), config.option.setuponly
        config.pluginmanager.register(self._reporter, REPORTER_NAME)
        self._reporter.recorded_warnings.clear()  # pytest calls the hook of a new plugin for all earlier warnings
        try:
            with silence_listeners(config.pluginmanager, self._reporter):
                return self._test_runner(index, next_index, test_dir, fixture)
        finally:
            if config.pluginmanager.hasplugin(REPORTER_NAME):
                config.pluginmanager.unregister(name=REPORTER_NAME)
            config.option.setuponly = setuponly
            if fixture_names:
                item.fixturenames[:] = fixture_names


def mark_cut_off_ranks(outcome: GroupOutcome) -> GroupOutcome:
    """Mark ranks as stopped if they failed only because another rank had crashed or closed its connection."""
    return replace(outcome, ranks=tuple(map(mark_if_cut_off, outcome.ranks)))


def mark_if_cut_off(rank: RankOutcome) -> RankOutcome:
    """Mark a rank as stopped and drop its failure if the failure only reports a lost rank.

    The function keeps the output of the phase.
    """
    for note in rank.notes:
        phase_report = load_phase_report(note)
        if (
            phase_report is None
            or note.status is not RankStatus.FAILED
            or not any(message in str(phase_report.report) for message in PEER_LOST_MESSAGES)
        ):
            continue
        notes = tuple(other for other in rank.notes if other is not note)
        output = [
            CapturedOutput(phase_report.phase, stream, text)
            for title, text in phase_report.report["sections"]
            for stream in ("stdout", "stderr")
            if title == f"Captured {stream} {phase_report.phase}"
        ]
        end = RankEnd.STOPPED if rank.end is RankEnd.RETURNED else rank.end
        return replace(
            rank,
            end=end,
            at_ns=note.at_ns,
            notes=notes,
            phase=phase_report.phase,
            captured_output=(*rank.captured_output, *output),
        )
    return rank
