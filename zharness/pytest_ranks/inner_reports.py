"""Merge the reports that ranks log while a test runs, such as those of subtests, into one report for all ranks."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from zharness.pytest_ranks import merge_output
from zharness.pytest_ranks.merge_reports import JointResult, judge_phase
from zharness.pytest_ranks.rank_problems import RankResult, TimedReport, find_problems, select_failures
from zharness.pytest_ranks.rank_text import mask_addresses
from zharness.world.messages import RankNote
from zharness.world.outcome import GroupOutcome, RankEnd, RankOutcome

InnerKey = tuple[str, str, int]  # a report's class, its subject, and the number of earlier reports like it on the rank


@dataclass(frozen=True)
class InnerReport:
    """A report that a rank logged while a test ran, pickled.

    The report is pickled instead of serialized in the format of pytest-xdist, because a round trip through that format
    quotes the values of a subtest twice.
    """

    pickled_report: bytes


def make_inner_report(report: pytest.TestReport) -> InnerReport:
    """Pickle a report. User properties that cannot be pickled are replaced by their ``repr``."""
    try:
        return InnerReport(pickle.dumps(report))
    except Exception:  # noqa: BLE001 - an object may raise any exception when it is pickled
        plain = copy.copy(report)
        plain.user_properties = [(name, repr(value)) for name, value in report.user_properties]
        return InnerReport(pickle.dumps(plain))


def merge_inner_reports(item: pytest.Item, outcome: GroupOutcome) -> list[pytest.TestReport]:
    """Return one report for each subtest, merged from the reports of the ranks that ran it, in order of time."""
    by_subtest: dict[InnerKey, dict[int, TimedReport]] = {}
    for rank in outcome.ranks:
        for key, timed_report in iter_inner_reports(rank):
            by_subtest.setdefault(key, {})[rank.rank] = timed_report
    in_order = sorted(by_subtest.values(), key=lambda reports: min(report.at_ns for report in reports.values()))
    return [merge_inner_report(item, reports) for reports in in_order]


def iter_inner_reports(rank: RankOutcome) -> Iterator[tuple[InnerKey, TimedReport]]:
    """Yield the reports that a rank logged while its test ran, each with the key that is the same on other ranks."""
    counts: Counter[tuple[str, str]] = Counter()
    for note in rank.notes:
        report = load_inner_report(note)
        if report is not None:
            name = (type(report).__qualname__, mask_addresses(repr(getattr(report, "context", ""))))
            yield (*name, counts[name]), TimedReport(note.at_ns, report)
            counts[name] += 1


def load_inner_report(note: RankNote) -> pytest.TestReport | None:
    """Unpickle the report in a note; return None for a note of another kind."""
    payload: Any = pickle.loads(note.payload)  # noqa: S301 - written by a rank that this process started
    if not isinstance(payload, InnerReport):
        return None
    report: pytest.TestReport = pickle.loads(payload.pickled_report)  # noqa: S301 - as above
    return report


def merge_inner_report(item: pytest.Item, reports: dict[int, TimedReport]) -> pytest.TestReport:
    """Merge the reports of one subtest, by rank. The merged report is failed if the subtest failed on some rank."""
    phase = str(next(iter(reports.values())).report.when)
    rank_results = tuple(
        RankResult(RankOutcome(rank, RankEnd.RETURNED, timed.at_ns), {phase: timed}, (phase,))
        for rank, timed in reports.items()
    )
    problems = find_problems(rank_results)
    result = JointResult(item, rank_results, problems, select_failures(problems), 0.0)
    verdict = judge_phase(result, phase)
    merged = copy.copy(verdict.source_report or rank_results[0].timed_reports[phase].report)
    merged.outcome, merged.longrepr = verdict.outcome, verdict.longrepr
    merged.duration = max(timed.report.duration for timed in reports.values())
    merged.sections = merge_output.merge_sections(rank_results, phase, (phase,))
    merged.user_properties = merge_output.merge_user_properties(rank_results, phase)
    return merged
