"""One verdict of N ranks on one test, as the reports that pytest would have made of it alone.

[Note: from ranks to reports]
``facts.py`` reads what ranks told and how they ended into facts, one for each thing that kept one rank from passing,
and orders them by blame: the first is the cause. Here each fact finds the report that tells of it, equal facts of
several ranks are folded, and what remains is words (``words.py``), pytest's own shapes (``longreprs.py``), and the
ranks' output side by side (``merged.py``).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import pytest

from zharness.pytest_ranks import longreprs, merge_output
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
from zharness.world.outcome import GroupOutcome, RankEnd
from zharness.world.stacks import strip_harness_frames

ProblemGroup = tuple[RankProblem, ...]  # facts that are alike, one for each of several ranks

_STOPPED_REASON = " because another rank had failed"
# What a joint report has of its own; anything else that a plugin set on a rank's report is handed on.
_MERGED_FIELDS = {
    *("nodeid", "location", "keywords", "outcome", "longrepr", "when", "sections", "duration", "start", "stop"),
    *("user_properties", "wasxfail", "$report_type"),
}


@dataclass(frozen=True)
class JointResult:
    """All that is known of one test on all its ranks; ``real`` are the facts that make it fail, the cause first."""

    item: pytest.Item
    rank_results: tuple[RankResult, ...]
    problems: tuple[RankProblem, ...]
    failures: tuple[RankProblem, ...]
    seconds: float

    @cached_property
    def failures_by_phase(self) -> dict[str, list[RankProblem]]:
        """The real failures by the phase whose report tells of them, in order of blame."""
        found: dict[str, list[RankProblem]] = {}
        for fact in self.failures:
            found.setdefault(choose_reporting_phase(fact, self.failures), []).append(fact)
        return found

    @cached_property
    def is_caused_by_skip(self) -> bool:
        """Whether the cause is a skip: nobody has failed then, and ranks that were stopped waited for one that left."""
        return bool(self.failures) and self.failures[0].kind is ProblemKind.SKIPPED

    def get_reports(self, phase: str) -> list[pytest.TestReport]:
        """What ranks told of ``phase``, in rank order."""
        return [account.timed_reports[phase].report for account in self.rank_results if phase in account.timed_reports]


@dataclass(frozen=True)
class PhaseVerdict:
    """What became of one phase. ``expected`` is the reason of the xfail mark, where one had its part in it."""

    outcome: Literal["passed", "failed", "skipped"]
    longrepr: Any = None
    xfail_reason: str | None = None
    source_report: pytest.TestReport | None = field(default=None, repr=False)  # whose further attributes are kept


def merge_reports(item: pytest.Item, outcome: GroupOutcome) -> list[pytest.TestReport]:
    """The reports of setup, call (unless setup stopped the test) and teardown, for pytest_runtest_logreport."""
    accounts = collect_rank_results(item, outcome)
    facts = apply_xfail_mark(find_problems(accounts), item)
    joint = JointResult(item, accounts, facts, select_failures(facts), outcome.seconds)
    verdicts = {"setup": judge_setup(joint)}
    if verdicts["setup"].outcome == "passed" and ("call" in joint.failures_by_phase or joint.get_reports("call")):
        verdicts["call"] = judge_phase(joint, "call")
    verdicts["teardown"] = judge_phase(joint, "teardown")
    reports: list[pytest.TestReport] = []
    for phase in verdicts:
        reports.append(make_test_report(joint, phase, verdicts, reports))
    return reports


def judge_setup(result: JointResult) -> PhaseVerdict:
    """That of setup. A call that failed on some rank needs a setup that passed, or it would not be shown."""
    if "call" in result.failures_by_phase and "setup" not in result.failures_by_phase:
        return PhaseVerdict("passed")
    return judge_phase(result, "setup")


def judge_phase(result: JointResult, phase: str) -> PhaseVerdict:
    """Failed if a real failure has its place here; else skipped by all, failed as expected by one, or passed."""
    if phase in result.failures_by_phase:
        return judge_failed_phase(result, phase)
    if result.rank_results and all(is_skipped(account, phase) for account in result.rank_results):
        return PhaseVerdict("skipped", make_skip_longrepr(result, phase))
    told = result.get_reports(phase)
    expected = sorted(
        (fact for fact in result.problems if is_expected_failure(fact, phase)), key=lambda fact: fact.blame_order
    )
    if expected:
        longrepr = make_longrepr(result, expected, make_ranks_section(result))
        return PhaseVerdict("skipped", longrepr, expected[0].xfail_reason, expected[0].report)
    unexpected = next((report.wasxfail for report in told if hasattr(report, "wasxfail")), None)
    return PhaseVerdict("passed", xfail_reason=unexpected)


def is_expected_failure(problem: RankProblem, phase: str) -> bool:
    """Whether it is an expected failure in ``phase``."""
    return problem.kind is ProblemKind.FAILED_AS_EXPECTED and problem.phase == phase


def judge_failed_phase(result: JointResult, phase: str) -> PhaseVerdict:
    """The failure of ``phase``: its first fact as the failure, and all that others have to say in sections."""
    placed = result.failures_by_phase[phase]
    groups = group_problems(placed)
    if placed[0].kind is ProblemKind.PASSED_UNEXPECTEDLY and len(groups[0]) == len(result.rank_results):
        return PhaseVerdict("failed", placed[0].report and placed[0].report.longrepr, source_report=placed[0].report)
    sections = [
        *make_ranks_section(result),
        *(section for group in groups[1:] for section in make_further_sections(group)),
    ]
    if result.failures[0] in placed:
        sections += make_stack_sections(result.rank_results)
    return PhaseVerdict("failed", make_longrepr(result, placed, sections), source_report=placed[0].report)


def group_problems(problems: Iterable[RankProblem]) -> list[ProblemGroup]:
    """Equal facts of several ranks together, in the order of the first of each."""
    groups: dict[tuple[object, ...], ProblemGroup] = {}
    for fact in problems:
        groups[fact.group_key] = (*groups.get(fact.group_key, ()), fact)
    return list(groups.values())


def make_longrepr(result: JointResult, problems: Sequence[RankProblem], sections: longreprs.Sections) -> Any:
    """The first of ``facts`` as the failure of a report."""
    group = group_problems(problems)[0]
    fact, words = group[0], format_headline(result, group)
    if fact.report is None:
        place = longreprs.locate_failure(result.item, f"({fact.pending_collective}) {fact.message}")
        return longreprs.build_longrepr(result.item, place, words, fact.details, sections)
    if isinstance(fact.report.longrepr, tuple):  # a skip
        file, line, _ = fact.report.longrepr
        return longreprs.build_longrepr(result.item, (str(file), line), words, "", sections)
    return longreprs.replace_headline(result.item, fact.report, words, sections)


def format_headline(result: JointResult, group: ProblemGroup) -> str:
    """What the short summary says: which ranks, and what."""
    fact, ranks = group[0], [fact.rank for fact in group]
    if fact.report is None:
        return format_rank_sentence(ranks, format_problem_message(result, fact))
    if isinstance(fact.report.longrepr, tuple):
        return describe_partial_skip(result, fact.phase)
    return f"{format_ranks(ranks)}: {fact.message}"


def describe_partial_skip(result: JointResult, phase: str) -> str:
    """Who skipped in ``phase``, why, and what became of the others."""
    skips = [fact for fact in result.problems if isinstance(getattr(fact.report, "longrepr", None), tuple)]
    skips = [fact for fact in skips if fact.phase == phase]
    ranks = {fact.rank for fact in skips}
    why = format_by_ranks({fact.rank: fact.message for fact in skips})
    others = describe_ranks(result, [account for account in result.rank_results if account.rank not in ranks])
    return f"skipped on {format_ranks(ranks)} of {len(result.rank_results)} only: {'; '.join([why, *others])}"


def make_skip_longrepr(result: JointResult, phase: str) -> tuple[str, int, str]:
    """The skip of the first rank, with the reasons of all."""
    reports = result.get_reports(phase)
    longrepr = reports[0].longrepr
    file, line = (longrepr[0], longrepr[1]) if isinstance(longrepr, tuple) else longreprs.locate_failure(result.item)
    reasons = {
        account.rank: get_report_message(report) for account, report in zip(result.rank_results, reports, strict=True)
    }
    return str(file), line, f"Skipped: {format_by_ranks(reasons)}"


def format_by_ranks(texts: dict[int, str]) -> str:
    """The text if it is one, else each with its ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    if len(ranks) == 1:
        return next(iter(ranks))
    return ", ".join(f"{text} ({format_ranks(those)})" for text, those in ranks.items())


def make_ranks_section(result: JointResult) -> list[tuple[str, str]]:
    """One line for each way in which ranks ended."""
    return [("Ranks", "\n".join(describe_ranks(result, result.rank_results)))] if result.rank_results else []


def describe_ranks(result: JointResult, rank_results: Sequence[RankResult]) -> list[str]:
    """What became of each rank in words, that of the cause first, equal ones folded."""
    cause = result.failures[0].rank if result.failures else -1
    alike: dict[tuple[object, ...], list[RankResult]] = {}
    for account in sorted(rank_results, key=lambda account: account.rank != cause):
        own = get_rank_problems(result, account.rank)
        alike.setdefault(tuple(fact.group_key for fact in own) or describe_rank_without_problems(account), []).append(
            account
        )
    return [
        format_rank_sentence([account.rank for account in group], *describe_rank(result, group[0]))
        for group in alike.values()
    ]


def describe_rank(result: JointResult, rank_result: RankResult) -> tuple[str, ...]:
    """What became of one rank, one thing after the other."""
    own = get_rank_problems(result, rank_result.rank)
    return tuple(describe_problem(result, fact) for fact in own) or describe_rank_without_problems(rank_result)


def get_rank_problems(result: JointResult, rank: int) -> list[RankProblem]:
    """The facts of one rank in the order in which they came about."""
    own = [fact for fact in result.problems if fact.rank == rank]
    return sorted(own, key=lambda fact: (PHASES.index(fact.phase), fact.at_ns))


def describe_rank_without_problems(rank_result: RankResult) -> tuple[str, ...]:
    """That of a rank which nothing kept from passing."""
    if any(is_skipped(rank_result, phase) for phase in PHASES):
        return ("skipped",)
    unexpected = any(hasattr(heard.report, "wasxfail") for heard in rank_result.timed_reports.values())
    return ("passed unexpectedly",) if unexpected else ("passed",)


def describe_problem(result: JointResult, problem: RankProblem) -> str:
    """A fact in one line that reads on after "rank 1 "."""
    if problem.report is None:
        return first_line(format_problem_message(result, problem))
    first = (
        problem.kind is ProblemKind.FAILED
        and bool(result.failures)
        and problem.group_key == result.failures[0].group_key
    )
    # A partial skip that an xfail mark expects is still told as the skip that it is.
    verb = ProblemKind.SKIPPED.value if isinstance(problem.report.longrepr, tuple) else problem.kind.value
    return f"{verb}{' first,' if first else ''} in {problem.phase}: {first_line(problem.message)}"


def format_problem_message(result: JointResult, problem: RankProblem) -> str:
    """The message of a fact that has no report."""
    return problem.message.replace(_STOPPED_REASON, "") if result.is_caused_by_skip else problem.message


def make_further_sections(group: ProblemGroup) -> list[tuple[str, str]]:
    """The section of a failure beside the first, if there is more to read of it than its line."""
    fact, who = group[0], format_ranks([fact.rank for fact in group])
    if fact.kind is ProblemKind.LEFT_BEHIND:
        return [(f"left behind by {who}", fact.details)]
    if fact.report is not None and not isinstance(fact.report.longrepr, tuple):
        return [(f"{who}: also {fact.kind.value} in {fact.phase}", fact.report.longreprtext)]
    return [(f"{who}: also {fact.kind.value} in {fact.phase}", fact.details)] if fact.details else []


def make_stack_sections(rank_results: Iterable[RankResult]) -> list[tuple[str, str]]:
    """Where the ranks stood that had to be ended; equal stacks once."""
    found: dict[str, list[RankResult]] = {}
    for account in rank_results:
        outcome = account.outcome
        if outcome.stack.strip() and outcome.end in (RankEnd.HUNG, RankEnd.STOPPED, RankEnd.RAISED):
            found.setdefault(mask_addresses(get_test_stack(account)), []).append(account)
    return [
        (f"stack of {format_ranks(account.rank for account in those)}", get_test_stack(those[0]))
        for those in found.values()
    ]


def get_test_stack(rank_result: RankResult) -> str:
    """Its stack without the frames that every rank has; all of it where nothing else is left."""
    return strip_harness_frames(rank_result.outcome.stack) or rank_result.outcome.stack.strip()


def make_test_report(
    result: JointResult, phase: str, verdicts: dict[str, PhaseVerdict], earlier_reports: Sequence[pytest.TestReport]
) -> pytest.TestReport:
    """The report of one phase."""
    item, told, found = result.item, result.get_reports(phase), verdicts[phase]
    own = told[0] if told else None
    start, stop, duration = measure_phase(result, phase, found, earlier_reports)
    until = [*PHASES[: PHASES.index(phase) + 1], *(one for one in PHASES if one not in verdicts)]
    source = found.source_report or own
    extra = {name: value for name, value in vars(source).items() if name not in _MERGED_FIELDS} if source else {}
    if found.xfail_reason is not None:
        extra["wasxfail"] = found.xfail_reason
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=own.location if own else item.location,
        keywords=own.keywords if own else dict.fromkeys(item.keywords, 1),
        outcome=found.outcome,
        longrepr=found.longrepr,
        when=phase,  # type: ignore[arg-type]  # one of the three
        sections=merge_output.merge_sections(result.rank_results, phase, until),
        duration=duration,
        start=start,
        stop=stop,
        user_properties=merge_output.merge_user_properties(result.rank_results, phase),
        **extra,
    )


def measure_phase(
    result: JointResult, phase: str, phase_verdict: PhaseVerdict, earlier_reports: Sequence[pytest.TestReport]
) -> tuple[float, float, float]:
    """Start, stop and duration of a phase in seconds: from the first rank's start to the last rank's end.

    A phase of which no rank lived to tell takes what the group took beside the phases before.
    """
    told = result.get_reports(phase)
    if told:
        starts, stops = [report.start for report in told], [report.stop for report in told]
        return min(starts), max(stops), max(report.duration for report in told)
    start = earlier_reports[-1].stop if earlier_reports else time.time() - result.seconds
    spent = sum(report.duration for report in earlier_reports)
    duration = 0.0 if phase_verdict.outcome == "passed" else max(0.0, result.seconds - spent)
    return start, start + duration, duration
