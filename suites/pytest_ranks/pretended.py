"""Ranks that are only pretended: one process runs a test once for each rank, and tells of it as ranks do."""

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


def ending(end: RankEnd, *told: str, **facts: Any) -> dict[str, Any]:
    """The end of a rank that told of these phases alone; ``facts`` are fields of its RankOutcome."""
    return {"end": end, "told": told, **facts}


SITE = "all_reduce (test_x.py, line 7)"
STOPPED = ending(RankEnd.STOPPED, "setup", phase="call", site=SITE)
KILLED = ending(RankEnd.SIGNALLED, "setup", phase="call", cause="SIGSEGV, before its function had returned")
PASSES = "def test_it(rank): pass"
PASSED = {"setup": "passed", "call": "passed", "teardown": "passed"}
CALL_FAILED = {**PASSED, "call": "failed"}
SETUP_FAILED = {"setup": "failed", "teardown": "passed"}


@dataclass(eq=False)  # pytest keeps plugins in sets
class Pretended:
    """A plugin. ``ends`` are ends of ranks other than a return, ``clock`` the times of phases: (rank, phase) to ns."""

    world_size: int
    ends: Mapping[int, dict[str, Any]] = field(default_factory=dict)
    clock: Mapping[tuple[int, str], int] = field(default_factory=dict)
    current: int = 0
    reports: list[pytest.TestReport] = field(default_factory=list)
    text: str = ""

    @pytest.fixture
    def rank(self) -> int:
        return self.current

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        outcome = GroupOutcome(tuple(self.run_rank(item, rank) for rank in range(self.world_size)), 2.0)
        item.user_properties.clear()
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in merge_reports(item, outcome):
            data = item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
            # What xdist does to a report on its way.
            travelled = execnet.loads(execnet.dumps(data))
            arrived = item.config.hook.pytest_report_from_serializable(config=item.config, data=travelled)
            self.reports.append(arrived)
            item.ihook.pytest_runtest_logreport(report=arrived)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def run_rank(self, item: pytest.Item, rank: int) -> RankOutcome:
        """Run the item as ``rank`` would, with nothing left of the rank before."""
        self.current = rank
        item.user_properties.clear()
        item._report_sections.clear()
        item.stash = pytest.Stash()
        facts = {"end": RankEnd.RETURNED, "at_ns": 100 + rank, "told": PHASES, **self.ends.get(rank, {})}
        told = facts.pop("told")
        reports = runtestprotocol(item, log=False, nextitem=None)
        notes = tuple(self.note(item, rank, report) for report in reports if report.when in told)
        return RankOutcome(rank, notes=notes, **facts)

    def note(self, item: pytest.Item, rank: int, report: pytest.TestReport) -> RankNote:
        data = item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
        at_ns = self.clock.get((rank, report.when), 10 * PHASES.index(report.when) + rank)
        standing = RankStatus.FAILED if report.failed else RankStatus.SKIPPED if report.skipped else RankStatus.OK
        return RankNote(rank, at_ns, standing, pickle.dumps(PhaseReport(report.when, data)))

    def of(self, phase: str) -> pytest.TestReport:
        """The joint report of ``phase``."""
        return next(report for report in self.reports if report.when == phase)

    @property
    def outcomes(self) -> dict[str, str]:
        """The outcome of each phase that has a report; ``xfailed`` and ``xpassed`` as the terminal counts them."""
        found = {}
        for report in self.reports:
            expected = {"skipped": "xfailed", "passed": "xpassed"} if hasattr(report, "wasxfail") else {}
            found[report.when] = expected.get(report.outcome, report.outcome)
        return found

    def section(self, title: str) -> str:
        """The text of a section of the one failure that has it."""
        texts = {
            text
            for report in self.reports
            for name, text, _ in getattr(report.longrepr, "sections", ())
            if name == title
        }
        assert len(texts) == 1, f"{len(texts)} sections {title!r} in {self.text}"
        return texts.pop()

    def message(self, phase: str = "call") -> str:
        """What the short summary says of ``phase``."""
        return self.of(phase).longrepr.reprcrash.message


Joint = Callable[..., Pretended]


def joint_of(directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Joint:
    """A function that runs the one test of a source on pretended ranks, in ``directory``."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(directory)

    def run(source: str, world_size: int = 2, *, args: Sequence[str] = (), **kwargs: Any) -> Pretended:
        # A name of its own for each: modules of one name would be taken for one.
        file = directory / f"test_pretended_{next(_numbers)}.py"
        file.write_text("import logging\nimport pytest\n" + dedent(source), encoding="utf-8")
        (directory / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        ranks = Pretended(world_size, **kwargs)
        off = ["-p", "no:cacheprovider", "-p", "no:faulthandler"]
        capsys.readouterr()
        status = pytest.main([str(file), f"--rootdir={directory}", "-s", "-ra", *off, *args], plugins=[ranks])
        ranks.text = capsys.readouterr().out
        assert status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), ranks.text
        return ranks

    return run
