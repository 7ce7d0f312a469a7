"""Simulate ranks in one process: run a test once for each rank and merge the reports as for real ranks."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any

import execnet
import pytest
from _pytest.runner import runtestprotocol  # what pytest-forked calls as well

from zharness.pytest_ranks.merge_reports import merge_reports
from zharness.pytest_ranks.phase_report import PHASES, PhaseReport
from zharness.world.messages import RankNote, RankStatus
from zharness.world.outcome import GroupOutcome, RankEnd, RankOutcome

_numbers = itertools.count()


def make_end(end: RankEnd, *reported: str, **fields: Any) -> dict[str, Any]:
    """Describe how a rank ends that reports only the phases ``reported``; ``fields`` are those of its RankOutcome."""
    return {"end": end, "reported": reported, **fields}


SITE = "all_reduce (test_x.py, line 7)"
STOPPED = make_end(RankEnd.STOPPED, "setup", phase="call", site=SITE)
KILLED = make_end(RankEnd.SIGNALLED, "setup", phase="call", cause="SIGSEGV, before its function had returned")
PASSES = "def test_it(rank): pass"
PASSED = {"setup": "passed", "call": "passed", "teardown": "passed"}
CALL_FAILED = {**PASSED, "call": "failed"}
SETUP_FAILED = {"setup": "failed", "teardown": "passed"}


@dataclass(eq=False)  # hashable, because pytest keeps plugins in sets
class SimulatedRanks:
    """Pytest plugin that runs each test once for each rank and logs the merged reports.

    ``ends`` says how ranks end that do not return normally; ``clock`` sets the time in ns of a rank's phase.
    """

    world_size: int
    ends: Mapping[int, dict[str, Any]] = field(default_factory=dict)
    clock: Mapping[tuple[int, str], int] = field(default_factory=dict)
    current: int = 0
    reports: list[pytest.TestReport] = field(default_factory=list)
    text: str = ""

    @pytest.fixture
    def rank(self) -> int:
        """The simulated rank."""
        return self.current

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        """Run the item on all simulated ranks, and log the merged reports after a round trip through xdist's format."""
        outcome = GroupOutcome(tuple(self.run_rank(item, rank) for rank in range(self.world_size)), 2.0)
        item.user_properties.clear()
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in merge_reports(item, outcome):
            data = item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
            received = execnet.loads(execnet.dumps(data))
            copy = item.config.hook.pytest_report_from_serializable(config=item.config, data=received)
            self.reports.append(copy)
            item.ihook.pytest_runtest_logreport(report=copy)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def run_rank(self, item: pytest.Item, rank: int) -> RankOutcome:
        """Run the item as ``rank``, without any state of the ranks before."""
        self.current = rank
        item.user_properties.clear()
        item._report_sections.clear()
        item.stash = pytest.Stash()
        fields = {"end": RankEnd.RETURNED, "at_ns": 100 + rank, "reported": PHASES, **self.ends.get(rank, {})}
        reported = fields.pop("reported")
        reports = runtestprotocol(item, log=False, nextitem=None)
        notes = tuple(self.make_note(item, rank, report) for report in reports if report.when in reported)
        return RankOutcome(rank, notes=notes, **fields)

    def make_note(self, item: pytest.Item, rank: int, report: pytest.TestReport) -> RankNote:
        """Make the note with which a rank sends a report."""
        data = item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
        at_ns = self.clock.get((rank, report.when), 10 * PHASES.index(report.when) + rank)
        status = RankStatus.FAILED if report.failed else RankStatus.SKIPPED if report.skipped else RankStatus.OK
        return RankNote(rank, at_ns, status, pickle.dumps(PhaseReport(report.when, data)))

    def report(self, phase: str) -> pytest.TestReport:
        """Return the merged report of ``phase``."""
        return next(report for report in self.reports if report.when == phase)

    @property
    def outcomes(self) -> dict[str, str]:
        """The outcome of each phase that has a report; ``xfailed`` and ``xpassed`` if an xfail mark decided it."""
        outcomes = {}
        for report in self.reports:
            xfail_names = {"skipped": "xfailed", "passed": "xpassed"} if hasattr(report, "wasxfail") else {}
            outcomes[report.when] = xfail_names.get(report.outcome, report.outcome)
        return outcomes

    def section(self, title: str) -> str:
        """Return the text of a section that exactly one failure has."""
        texts = {
            text
            for report in self.reports
            for name, text, _ in getattr(report.longrepr, "sections", ())
            if name == title
        }
        assert len(texts) == 1, f"{len(texts)} sections {title!r} in {self.text}"
        return texts.pop()

    def message(self, phase: str = "call") -> str:
        """Return the message of ``phase`` in the short summary."""
        return self.report(phase).longrepr.reprcrash.message


RunTest = Callable[..., SimulatedRanks]


def make_run_test(directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> RunTest:
    """Return a function that runs the one test of a source on simulated ranks, in ``directory``."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(directory)

    def run(source: str, world_size: int = 2, *, args: Sequence[str] = (), **kwargs: Any) -> SimulatedRanks:
        # Each file needs another name, because Python imports a module name only once.
        file = directory / f"test_simulated_{next(_numbers)}.py"
        file.write_text("import logging\nimport pytest\n" + dedent(source), encoding="utf-8")
        (directory / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        ranks = SimulatedRanks(world_size, **kwargs)
        options = ["-p", "no:cacheprovider", "-p", "no:faulthandler"]
        capsys.readouterr()
        status = pytest.main([str(file), f"--rootdir={directory}", "-s", "-ra", *options, *args], plugins=[ranks])
        ranks.text = capsys.readouterr().out
        assert status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), ranks.text
        return ranks

    return run
