"""Merge the reports of N ranks into one report for each phase of a test, as for a test that pytest runs itself.

[Note: from ranks to reports]
``rank_problems.py`` turns the reports and the end of each rank into problems and orders them by blame: the first one is
the cause. This file chooses the phase in which each problem is reported and groups equal problems of several ranks.
``rank_text.py`` formats lists of ranks, ``longreprs.py`` builds pytest's failure objects, ``merge_output.py`` merges
the ranks' output.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import pytest

from zharness.pytest_ranks import longreprs, merge_output
from zharness.pytest_ranks.example_notes import load_example_notes
from zharness.pytest_ranks.example_verdict import RETURNED, find_common_failure
from zharness.pytest_ranks.phase_report import PHASES
from zharness.pytest_ranks.rank_problems import (
    ProblemKind,
    RankProblem,
    RankResult,
    apply_xfail_mark,
    choose_reporting_phase,
    collect_rank_results,
    find_problems,
    get_report_message,
    is_skipped,
    select_failures,
)
from zharness.pytest_ranks.rank_text import first_line, format_rank_sentence, format_ranks, mask_addresses
from zharness.world.messages import RankStatus
from zharness.world.outcome import GroupOutcome, RankEnd
from zharness.world.stacks import strip_harness_frames

ProblemGroup = tuple[RankProblem, ...]  # equal problems of several ranks, one for each rank

_STOPPED_REASON = " because another rank had failed"
# Attributes of a merged report that are computed here. Other attributes, set by plugins, are copied from a rank.
_MERGED_FIELDS = {
    *("nodeid", "location", "keywords", "outcome", "longrepr", "when", "sections", "duration", "start", "stop"),
    *("user_properties", "wasxfail", "$report_type"),
}


@dataclass(frozen=True)
class JointResult:
    """The results of one test on all its ranks.

    ``failures`` are the problems that make the test fail. The first is the cause.
    """

    item: pytest.Item
    rank_results: tuple[RankResult, ...]
    problems: tuple[RankProblem, ...]
    failures: tuple[RankProblem, ...]
    seconds: float

    @cached_property
    def failures_by_phase(self) -> dict[str, list[RankProblem]]:
        """Return the failures grouped by the phase in which they are reported, each list in order of blame."""
        by_phase: dict[str, list[RankProblem]] = {}
        for problem in self.failures:
            by_phase.setdefault(choose_reporting_phase(problem, self.failures), []).append(problem)
        return by_phase

    @cached_property
    def is_caused_by_skip(self) -> bool:
        """Return whether the test failed because only some of its ranks skipped.

        In this case, the ranks that were stopped had waited for a rank that skipped, not for a rank that failed.
        """
        return bool(self.failures) and self.failures[0].kind is ProblemKind.SKIPPED

    def get_reports(self, phase: str) -> list[pytest.TestReport]:
        """Return all reports of ``phase`` that ranks have sent, in rank order."""
        return [
            rank_result.timed_reports[phase].report
            for rank_result in self.rank_results
            if phase in rank_result.timed_reports
        ]


@dataclass(frozen=True)
class PhaseVerdict:
    """The outcome of one phase on all ranks; ``xfail_reason`` is not None if an xfail mark decided the outcome.

    Attributes that plugins set on ``source_report`` are copied to the merged report.
    """

    outcome: Literal["passed", "failed", "skipped"]
    longrepr: Any = None
    xfail_reason: str | None = None
    source_report: pytest.TestReport | None = field(default=None, repr=False)


def merge_reports(item: pytest.Item, outcome: GroupOutcome) -> list[pytest.TestReport]:
    """Return the merged reports of setup, call and teardown, which the caller passes to ``pytest_runtest_logreport``.

    The list contains no report of the call if setup failed or was skipped.
    """
    rank_results = collect_rank_results(item, outcome)
    problems = apply_xfail_mark(find_problems(rank_results), item)
    result = JointResult(item, rank_results, problems, select_failures(problems), outcome.seconds)
    verdicts = {"setup": judge_setup(result)}
    if verdicts["setup"].outcome == "passed" and ("call" in result.failures_by_phase or result.get_reports("call")):
        verdicts["call"] = judge_phase(result, "call")
    verdicts["teardown"] = judge_phase(result, "teardown")
    reports: list[pytest.TestReport] = []
    for phase in verdicts:
        reports.append(make_test_report(result, phase, verdicts, reports))
    return reports


def judge_setup(result: JointResult) -> PhaseVerdict:
    """Return the verdict on setup.

    Setup counts as passed if a failure is reported in the call, because pytest shows a call only after a passed setup.
    """
    if "call" in result.failures_by_phase and "setup" not in result.failures_by_phase:
        return PhaseVerdict("passed")
    return judge_phase(result, "setup")


def judge_phase(result: JointResult, phase: str) -> PhaseVerdict:
    """Return the verdict on one phase: failed, skipped, xfailed or passed.

    The phase is failed if any failure is reported in that phase, and skipped if all ranks skipped.
    """
    if phase in result.failures_by_phase:
        return judge_failed_phase(result, phase)
    if result.rank_results and all(is_skipped(rank_result, phase) for rank_result in result.rank_results):
        return PhaseVerdict("skipped", make_skip_longrepr(result, phase))
    reports = result.get_reports(phase)
    expected = sorted(
        (problem for problem in result.problems if is_expected_failure(problem, phase)),
        key=lambda problem: problem.blame_order,
    )
    if expected:
        longrepr = make_longrepr(result, expected, make_ranks_section(result))
        return PhaseVerdict("skipped", longrepr, expected[0].xfail_reason, expected[0].report)
    xpass_reason = next((report.wasxfail for report in reports if hasattr(report, "wasxfail")), None)
    return PhaseVerdict("passed", xfail_reason=xpass_reason)


def is_expected_failure(problem: RankProblem, phase: str) -> bool:
    """Return whether the problem is a failure in ``phase`` that an xfail mark expects."""
    return problem.kind is ProblemKind.FAILED_AS_EXPECTED and problem.phase == phase


def judge_failed_phase(result: JointResult, phase: str) -> PhaseVerdict:
    """Return the verdict on a failed phase: the first failure with its traceback, each other failure as a section."""
    failures = result.failures_by_phase[phase]
    cause, groups = failures[0], group_problems(failures)
    if cause.kind is ProblemKind.PASSED_UNEXPECTEDLY and len(groups[0]) == len(result.rank_results):
        return PhaseVerdict("failed", cause.report and cause.report.longrepr, source_report=cause.report)
    sections = [
        *make_ranks_section(result),
        *(section for group in groups[1:] for section in make_further_sections(group)),
    ]
    if result.failures[0] in failures:
        sections += [*make_example_sections(result.rank_results), *make_stack_sections(result.rank_results)]
    return PhaseVerdict("failed", make_longrepr(result, failures, sections), source_report=cause.report)


def group_problems(problems: Iterable[RankProblem]) -> list[ProblemGroup]:
    """Group equal problems of several ranks; the groups have the order of their first problems."""
    groups: dict[tuple[object, ...], ProblemGroup] = {}
    for problem in problems:
        groups[problem.group_key] = (*groups.get(problem.group_key, ()), problem)
    return list(groups.values())


def make_longrepr(result: JointResult, problems: Sequence[RankProblem], sections: longreprs.Sections) -> Any:
    """Build the failure representation of a report from its first group of equal problems, followed by ``sections``."""
    group = group_problems(problems)[0]
    problem, headline = group[0], format_headline(result, group)
    if problem.report is None:
        location = longreprs.locate_failure(result.item, f"({problem.pending_collective}) {problem.message}")
        return longreprs.build_longrepr(result.item, location, headline, problem.details, sections)
    if isinstance(problem.report.longrepr, tuple):  # a skip
        file, line, _ = problem.report.longrepr
        return longreprs.build_longrepr(result.item, (str(file), line), headline, "", sections)
    return longreprs.replace_headline(result.item, problem.report, headline, sections)


def format_headline(result: JointResult, group: ProblemGroup) -> str:
    """Format the line of the short summary, which names the ranks of the group and their problem."""
    problem, ranks = group[0], [problem.rank for problem in group]
    if problem.report is None:
        return format_rank_sentence(ranks, format_problem_message(result, problem))
    if isinstance(problem.report.longrepr, tuple):
        return describe_partial_skip(result, problem.phase)
    crash = getattr(problem.report.longrepr, "reprcrash", None)
    common = find_common_failure(str(getattr(crash, "message", "")))  # it names its ranks itself
    return common or f"{format_ranks(ranks)}: {problem.message}"


def describe_partial_skip(result: JointResult, phase: str) -> str:
    """Describe a skip on some ranks only.

    The text names the ranks that skipped in ``phase``, the reason for the skip, and how the other ranks ended.
    """
    skips = [problem for problem in result.problems if isinstance(getattr(problem.report, "longrepr", None), tuple)]
    skips = [problem for problem in skips if problem.phase == phase]
    ranks = {problem.rank for problem in skips}
    reasons = format_by_ranks({problem.rank: problem.message for problem in skips})
    others = describe_ranks(result, [other for other in result.rank_results if other.rank not in ranks])
    return f"skipped on {format_ranks(ranks)} of {len(result.rank_results)} only: {'; '.join([reasons, *others])}"


def make_skip_longrepr(result: JointResult, phase: str) -> tuple[str, int, str]:
    """Make the failure representation of a skip on all ranks: file and line of rank 0, and the reasons of all ranks."""
    reports = result.get_reports(phase)
    longrepr = reports[0].longrepr
    file, line = (longrepr[0], longrepr[1]) if isinstance(longrepr, tuple) else longreprs.locate_failure(result.item)
    reasons = {
        rank_result.rank: get_report_message(report)
        for rank_result, report in zip(result.rank_results, reports, strict=True)
    }
    return str(file), line, f"Skipped: {format_by_ranks(reasons)}"


def format_by_ranks(texts: dict[int, str]) -> str:
    """Join the texts, each with its ranks, as in ``x (ranks 0, 2)``. A text of all ranks is returned as it is."""
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks_by_text.setdefault(text, []).append(rank)
    if len(ranks_by_text) == 1:
        return next(iter(ranks_by_text))
    return ", ".join(f"{text} ({format_ranks(ranks)})" for text, ranks in ranks_by_text.items())


def make_ranks_section(result: JointResult) -> list[tuple[str, str]]:
    """Make the section "Ranks", which has one line for each group of ranks that ended in the same way."""
    return [("Ranks", "\n".join(describe_ranks(result, result.rank_results)))] if result.rank_results else []


def describe_ranks(result: JointResult, rank_results: Sequence[RankResult]) -> list[str]:
    """Describe how each rank ended, in one sentence for all ranks that ended in the same way; the cause is first."""
    cause_rank = result.failures[0].rank if result.failures else -1
    groups: dict[tuple[object, ...], list[RankResult]] = {}
    for rank_result in sorted(rank_results, key=lambda rank_result: rank_result.rank != cause_rank):
        problem_keys = tuple(problem.group_key for problem in get_rank_problems(result, rank_result.rank))
        groups.setdefault(problem_keys or describe_rank_without_problems(rank_result), []).append(rank_result)
    return [
        format_rank_sentence([rank_result.rank for rank_result in group], *describe_rank(result, group[0]))
        for group in groups.values()
    ]


def describe_rank(result: JointResult, rank_result: RankResult) -> tuple[str, ...]:
    """Return the predicates that describe the problems of one rank, in order of time."""
    problems = get_rank_problems(result, rank_result.rank)
    return tuple(describe_problem(result, problem) for problem in problems) or describe_rank_without_problems(
        rank_result
    )


def get_rank_problems(result: JointResult, rank: int) -> list[RankProblem]:
    """Return the problems of one rank in order of time."""
    problems = [problem for problem in result.problems if problem.rank == rank]
    return sorted(problems, key=lambda problem: (PHASES.index(problem.phase), problem.at_ns))


def describe_rank_without_problems(rank_result: RankResult) -> tuple[str, ...]:
    """Return the predicate of a rank without problems: skipped, passed or passed unexpectedly."""
    if any(is_skipped(rank_result, phase) for phase in PHASES):
        return ("skipped",)
    is_xpassed = any(hasattr(timed_report.report, "wasxfail") for timed_report in rank_result.timed_reports.values())
    return ("passed unexpectedly",) if is_xpassed else ("passed",)


def describe_problem(result: JointResult, problem: RankProblem) -> str:
    """Describe a problem in one line, as a predicate that follows "rank 1 "."""
    if problem.report is None:
        return first_line(format_problem_message(result, problem))
    is_first_failure = (
        problem.kind is ProblemKind.FAILED
        and bool(result.failures)
        and problem.group_key == result.failures[0].group_key
    )
    # A skip on some ranks that an xfail mark expects has another kind, but is still described as a skip.
    verb = ProblemKind.SKIPPED.value if isinstance(problem.report.longrepr, tuple) else problem.kind.value
    return f"{verb}{' first,' if is_first_failure else ''} in {problem.phase}: {first_line(problem.message)}"


def format_problem_message(result: JointResult, problem: RankProblem) -> str:
    """Return the message for a problem on a rank that sent no pytest report.

    If a skip on another rank caused the problem, the message does not say that a rank failed.
    """
    return problem.message.replace(_STOPPED_REASON, "") if result.is_caused_by_skip else problem.message


def make_further_sections(group: ProblemGroup) -> list[tuple[str, str]]:
    """Make the section that shows a failure other than the first; return no section if the failure has no details."""
    problem, ranks = group[0], format_ranks([problem.rank for problem in group])
    if problem.kind is ProblemKind.LEFT_BEHIND:
        return [(f"left behind by {ranks}", problem.details)]
    title = f"{ranks}: also {problem.kind.value} in {problem.phase}"
    if problem.report is not None and not isinstance(problem.report.longrepr, tuple):
        return [(title, problem.report.longreprtext)]
    return [(title, problem.details)] if problem.details else []


def make_example_sections(rank_results: Iterable[RankResult]) -> list[tuple[str, str]]:
    """Make one section, with its error or return, for each rank that ended an example but not the Hypothesis test."""
    notes = [
        (rank_result.rank, load_example_notes(rank_result.outcome))
        for rank_result in rank_results
        if rank_result.outcome.end in (RankEnd.HUNG, RankEnd.STOPPED)
    ]
    return [
        (
            f"rank {rank} left the example {last.verdict.arguments}",
            f"{last.error}\n{last.verdict.traceback}".strip() or RETURNED,
        )
        for rank, (*_, last) in ((rank, found) for rank, found in notes if found)
        if last.status is not RankStatus.OK
    ]


def make_stack_sections(rank_results: Iterable[RankResult]) -> list[tuple[str, str]]:
    """Make one section for each different stack of ranks that hung, were stopped, or raised outside of the test."""
    by_stack: dict[str, list[RankResult]] = {}
    for rank_result in rank_results:
        outcome = rank_result.outcome
        if outcome.stack.strip() and outcome.end in (RankEnd.HUNG, RankEnd.STOPPED, RankEnd.RAISED):
            by_stack.setdefault(mask_addresses(get_test_stack(rank_result)), []).append(rank_result)
    return [
        (f"stack of {format_ranks(rank_result.rank for rank_result in group)}", get_test_stack(group[0]))
        for group in by_stack.values()
    ]


def get_test_stack(rank_result: RankResult) -> str:
    """Return a rank's stack without the harness's frames, or the whole stack if all frames are the harness's."""
    return strip_harness_frames(rank_result.outcome.stack) or rank_result.outcome.stack.strip()


def make_test_report(
    result: JointResult, phase: str, verdicts: dict[str, PhaseVerdict], earlier_reports: Sequence[pytest.TestReport]
) -> pytest.TestReport:
    """Make the merged report of one phase; ``earlier_reports`` are the merged reports of earlier phases."""
    item, rank_reports, verdict = result.item, result.get_reports(phase), verdicts[phase]
    first_report = rank_reports[0] if rank_reports else None
    start, stop, duration = measure_phase(result, phase, verdict, earlier_reports)
    # Output of phases without a merged report is shown too; otherwise it would be lost.
    shown_phases = [*PHASES[: PHASES.index(phase) + 1], *(name for name in PHASES if name not in verdicts)]
    source = verdict.source_report or first_report
    extra = {name: value for name, value in vars(source).items() if name not in _MERGED_FIELDS} if source else {}
    if verdict.xfail_reason is not None:
        extra["wasxfail"] = verdict.xfail_reason
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=first_report.location if first_report else item.location,
        keywords=first_report.keywords if first_report else dict.fromkeys(item.keywords, 1),
        outcome=verdict.outcome,
        longrepr=verdict.longrepr,
        when=phase,  # type: ignore[arg-type]  # a name of PHASES
        sections=merge_output.merge_sections(result.rank_results, phase, shown_phases),
        duration=duration,
        start=start,
        stop=stop,
        user_properties=merge_output.merge_user_properties(result.rank_results, phase),
        **extra,
    )


def measure_phase(
    result: JointResult, phase: str, phase_verdict: PhaseVerdict, earlier_reports: Sequence[pytest.TestReport]
) -> tuple[float, float, float]:
    """Return the earliest start, latest stop and longest duration of a phase over all ranks, in seconds.

    If no rank reported a failed phase, its duration is that of the whole test minus the durations of earlier phases.
    """
    reports = result.get_reports(phase)
    if reports:
        starts, stops = [report.start for report in reports], [report.stop for report in reports]
        return min(starts), max(stops), max(report.duration for report in reports)
    start = earlier_reports[-1].stop if earlier_reports else time.time() - result.seconds
    spent = sum(report.duration for report in earlier_reports)
    duration = 0.0 if phase_verdict.outcome == "passed" else max(0.0, result.seconds - spent)
    return start, start + duration, duration
