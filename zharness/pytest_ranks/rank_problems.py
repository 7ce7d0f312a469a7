"""What keeps ranks from passing, as facts: read from what they told and from how they ended, put in order of blame."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import pytest

from zharness.pytest_ranks.phase_report import PHASES, PhaseReport
from zharness.pytest_ranks.rank_text import first_line, mask_addresses
from zharness.world.messages import RankNote
from zharness.world.outcome import MISMATCH_EXCEPTION, GroupOutcome, RankEnd, RankOutcome
from zharness.world.stacks import strip_harness_frames

FATAL_ERROR_PREFIX = "Fatal Python error"  # faulthandler's first words
STRICT_XPASS_PREFIX = "[XPASS(strict)]"  # pytest's only sign of a strict xfail mark whose test passed
# How the server places a death; the phase says more than the first.
_BEFORE_RETURN = ", before its function had returned"
_AFTER_RETURN = ", after its function had returned"


class ProblemKind(Enum):
    """The ways not to pass."""

    FAILED = "failed"
    PASSED_UNEXPECTEDLY = "passed unexpectedly"  # under a strict xfail mark
    FAILED_AS_EXPECTED = "failed as expected"
    SKIPPED = "skipped"  # while other ranks did not
    DIED = "died"
    HARNESS_ERROR = "broke"  # the machinery around the test raised
    HUNG = "hung"
    STOPPED = "stopped"
    MISSING_REPORT = "silent"  # returned without having told of every phase
    LEFT_BEHIND = "left behind"


class BlameLevel(Enum):
    """Which facts come before which, whatever the clocks say; within one level the first in time comes first.

    A peer notices the closed connection of a dead rank before the server notices the death. A rank that hangs without
    waiting for anybody is one for which the others wait.
    """

    DEATH = 0
    HARNESS_ERROR = 1
    REPORTED = 2
    HUNG_ALONE = 3
    HUNG_IN_COLLECTIVE = 4
    LEFTOVER = 5
    STOPPED = 6


@dataclass(frozen=True)
class RankProblem:
    """One thing that kept one rank from passing.

    ``message`` is the exception of a report, the reason of a skip, and otherwise reads on after "rank 1 ". ``waiting``
    is the collective in which the rank stood, ``text`` what there is to read where there is no report, and ``reason``
    that of the xfail mark which expects it.
    """

    rank: int
    phase: str
    at_ns: int
    kind: ProblemKind
    blame: BlameLevel
    message: str
    pending_collective: str = ""
    details: str = ""
    xfail_reason: str = ""
    report: pytest.TestReport | None = None

    @property
    def blame_order(self) -> tuple[int, int, int]:
        """Facts are blamed in this order."""
        return (self.blame.value, self.at_ns, self.rank)

    @property
    def group_key(self) -> tuple[object, ...]:
        """Equal for facts that are told once for all their ranks."""
        crash = getattr(self.report and self.report.longrepr, "reprcrash", None)
        place = (crash.path, crash.lineno) if crash is not None else None
        return (self.kind, self.phase, place, mask_addresses(self.message), self.pending_collective)


@dataclass(frozen=True)
class TimedReport:
    """The report of one phase of one rank, and when the phase ended."""

    at_ns: int
    report: pytest.TestReport


@dataclass(frozen=True)
class RankResult:
    """One rank's end beside what it told, phase by phase; ``due`` are the phases it should have told of."""

    outcome: RankOutcome
    timed_reports: Mapping[str, TimedReport]
    expected_phases: tuple[str, ...]

    @property
    def rank(self) -> int:
        return self.outcome.rank

    @property
    def missing_phases(self) -> tuple[str, ...]:
        """The phases of which it did not tell, the first one first."""
        return tuple(phase for phase in self.expected_phases if phase not in self.timed_reports)

    def latest_report(self, phase: str) -> pytest.TestReport | None:
        """Its report of ``phase`` or, where there is none, of the last phase before: reports accumulate."""
        until = PHASES[: PHASES.index(phase) + 1]
        return next((self.timed_reports[one].report for one in reversed(until) if one in self.timed_reports), None)


def collect_rank_results(item: pytest.Item, outcome: GroupOutcome) -> tuple[RankResult, ...]:
    """Every rank's account, in rank order."""
    return tuple(make_rank_result(item, rank) for rank in outcome.ranks)


def make_rank_result(item: pytest.Item, outcome: RankOutcome) -> RankResult:
    """A rank's reports made whole again. Its last word on a phase stands: subtests tell of the call before the test."""
    heard: dict[str, TimedReport] = {}
    for note in outcome.notes:
        told = load_phase_report(note)
        if told is None:
            continue
        report = item.config.hook.pytest_report_from_serializable(config=item.config, data=told.report)
        if report is not None:
            heard[told.phase] = TimedReport(note.at_ns, report)
    set_up = "setup" not in heard or heard["setup"].report.passed
    called = set_up and not item.config.getoption("setuponly", False)
    return RankResult(outcome, heard, PHASES if called else ("setup", "teardown"))


def load_phase_report(note: RankNote) -> PhaseReport | None:
    """What a note tells of a phase. Its bytes, unpickled anew for each caller, were written by a rank of our own."""
    told: Any = pickle.loads(note.payload)  # noqa: S301 - see the docstring
    return told if isinstance(told, PhaseReport) else None


def find_problems(rank_results: Sequence[RankResult]) -> tuple[RankProblem, ...]:
    """Every fact of every rank. A group of no ranks is one too: nothing was tested."""
    if not rank_results:
        return (RankProblem(0, "setup", 0, ProblemKind.MISSING_REPORT, BlameLevel.REPORTED, "was never started"),)
    unanimous = {phase for phase in PHASES if all(is_skipped(account, phase) for account in rank_results)}
    facts: list[RankProblem] = []
    for account in rank_results:
        told = [make_reported_problem(account.rank, phase, heard) for phase, heard in account.timed_reports.items()]
        told = [fact for fact in told if not (fact and fact.kind is ProblemKind.SKIPPED and fact.phase in unanimous)]
        own = [fact for fact in told if fact is not None]
        facts += [*own, *find_end_problems(account, own)]
    return tuple(facts)


def is_skipped(rank_result: RankResult, phase: str) -> bool:
    """Whether the rank told that it skipped in ``phase``; an expected failure is not a skip."""
    heard = rank_result.timed_reports.get(phase)
    return heard is not None and heard.report.skipped and not hasattr(heard.report, "wasxfail")


def make_reported_problem(rank: int, phase: str, timed_report: TimedReport) -> RankProblem | None:
    """What a report says against passing."""
    report = timed_report.report
    if report.passed:
        return None
    kind, reason = ProblemKind.FAILED, ""
    if report.skipped and hasattr(report, "wasxfail"):
        kind, reason = ProblemKind.FAILED_AS_EXPECTED, report.wasxfail
    elif report.skipped:
        kind = ProblemKind.SKIPPED
    elif isinstance(report.longrepr, str) and report.longrepr.startswith(STRICT_XPASS_PREFIX):
        kind = ProblemKind.PASSED_UNEXPECTEDLY
    return RankProblem(
        rank,
        phase,
        timed_report.at_ns,
        kind,
        BlameLevel.REPORTED,
        get_report_message(report),
        xfail_reason=reason,
        report=report,
    )


def get_report_message(report: pytest.TestReport) -> str:
    """The exception in words, or the reason of a skip."""
    longrepr = report.longrepr
    if isinstance(longrepr, tuple):
        return str(longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(longrepr, "reprcrash", None)
    if crash is not None:
        return str(crash.message)
    # A missing fixture, or an item of another plugin: plain text, in which pytest marks the error with an E.
    lines = str(longrepr or f"{report.outcome} without a word").splitlines()
    return next((line[1:].strip() for line in lines if line.startswith("E ")), first_line("\n".join(lines)))


def find_end_problems(rank_result: RankResult, reported_problems: Sequence[RankProblem]) -> list[RankProblem]:
    """What the end of a rank says against passing, beside what it told."""
    outcome = rank_result.outcome
    failed = [fact for fact in reported_problems if fact.kind is ProblemKind.FAILED]
    if outcome.end is RankEnd.STOPPED or outcome.end is RankEnd.HUNG:
        return [make_unfinished_problem(rank_result, is_blameless=not failed)]
    if outcome.end is not RankEnd.RETURNED:
        return [make_crash_problem(rank_result, failed)]
    facts = []
    if rank_result.missing_phases:
        words = f"told nothing of its {rank_result.missing_phases[0]}"
        facts.append(
            RankProblem(
                rank_result.rank,
                rank_result.missing_phases[0],
                outcome.at_ns,
                ProblemKind.MISSING_REPORT,
                BlameLevel.REPORTED,
                words,
            )
        )
    if outcome.leftovers:
        words, text = "left behind: " + "; ".join(outcome.leftovers), "\n".join(outcome.leftovers)
        facts.append(
            RankProblem(
                rank_result.rank,
                "teardown",
                outcome.at_ns,
                ProblemKind.LEFT_BEHIND,
                BlameLevel.LEFTOVER,
                words,
                details=text,
            )
        )
    return facts


def make_unfinished_problem(rank_result: RankResult, *, is_blameless: bool) -> RankProblem:
    """A rank that had to be ended."""
    outcome, (phase, where) = rank_result.outcome, locate_end(rank_result)
    waiting = f", waiting in {outcome.site}" if outcome.site else ""
    if outcome.end is RankEnd.STOPPED:
        words = (outcome.end.value if is_blameless else "was stopped") + (waiting or f", {where}")
        return RankProblem(
            rank_result.rank, phase, outcome.at_ns, ProblemKind.STOPPED, BlameLevel.STOPPED, words, outcome.site
        )
    words = f"{outcome.end.value}, {where}" + (f": {outcome.cause}" if outcome.cause else "")
    words += "" if outcome.site in outcome.cause else waiting
    blame = BlameLevel.HUNG_IN_COLLECTIVE if outcome.site else BlameLevel.HUNG_ALONE
    return RankProblem(rank_result.rank, phase, outcome.at_ns, ProblemKind.HUNG, blame, words, outcome.site)


def make_crash_problem(rank_result: RankResult, reported_failures: Sequence[RankProblem]) -> RankProblem:
    """A rank that died, or whose machinery raised.

    What it failed of before, it told before; and machinery that raises behind the last phase, where the ranks leave
    together, raises because of a peer. Both are placed by the clock then.
    """
    outcome, (phase, where) = rank_result.outcome, locate_end(rank_result)
    cause, *further = outcome.cause.split("\n")
    words = f"{outcome.end.value}: {cause}" if cause else outcome.end.value
    if _BEFORE_RETURN in words:
        words = words.replace(_BEFORE_RETURN, f", {where}")
    elif _AFTER_RETURN not in words:
        words = f"{words}, {where}"
    words = "\n".join([words, *further])
    kind = ProblemKind.HARNESS_ERROR if outcome.end is RankEnd.RAISED else ProblemKind.DIED
    blame = BlameLevel.DEATH if kind is ProblemKind.DIED else BlameLevel.HARNESS_ERROR
    if reported_failures or (kind is ProblemKind.HARNESS_ERROR and not rank_result.missing_phases):
        blame = BlameLevel.REPORTED
    if outcome.exception == MISMATCH_EXCEPTION:  # found by the server; the ranks told what came of it
        blame, phase, words = (
            BlameLevel.DEATH,
            reported_failures[0].phase if reported_failures else phase,
            f"disagreed: {outcome.cause}",
        )
    return RankProblem(rank_result.rank, phase, outcome.at_ns, kind, blame, words, details=get_crash_text(outcome))


def locate_end(rank_result: RankResult) -> tuple[str, str]:
    """The phase in which a rank ended, and in words."""
    if not rank_result.missing_phases:
        return "teardown", "after teardown"
    if rank_result.outcome.phase in PHASES:
        return rank_result.outcome.phase, f"in {rank_result.outcome.phase}"
    return rank_result.missing_phases[0], f"before {rank_result.missing_phases[0]}"


def get_crash_text(outcome: RankOutcome) -> str:
    """The traceback of machinery that raised, or the stack that Python wrote when it died."""
    if outcome.end is RankEnd.RAISED:
        return outcome.traceback.rstrip()
    errors = outcome.stack or "".join(part.text for part in outcome.captured_output if part.stream == "stderr")
    at = errors.rfind(FATAL_ERROR_PREFIX)
    return strip_harness_frames(errors[at:]) if at >= 0 else ""


XFAIL_KINDS = (
    ProblemKind.DIED,
    ProblemKind.HARNESS_ERROR,
    ProblemKind.HUNG,
    ProblemKind.SKIPPED,
    ProblemKind.LEFT_BEHIND,
)


def apply_xfail_mark(problems: Sequence[RankProblem], item: pytest.Item) -> tuple[RankProblem, ...]:
    """The facts as an xfail mark sees them: of what has no report, a mark that expects any failure expects it all."""
    reason = get_xfail_reason(item) if any(fact.kind in XFAIL_KINDS for fact in problems) else None
    if reason is None:
        return tuple(problems)
    return tuple(
        replace(fact, kind=ProblemKind.FAILED_AS_EXPECTED, xfail_reason=reason) if fact.kind in XFAIL_KINDS else fact
        for fact in problems
    )


def get_xfail_reason(item: pytest.Item) -> str | None:
    """The reason of the item's xfail mark, if it holds here and expects any failure of a test that is run."""
    # No public name evaluates the conditions of xfail marks.
    from _pytest.skipping import evaluate_xfail_marks

    if item.config.getoption("runxfail", False):
        return None
    try:
        mark = evaluate_xfail_marks(item)
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 - a broken condition expects nothing; ranks told of it
        return None
    return mark.reason if mark is not None and mark.run and mark.raises is None else None


def select_failures(problems: Iterable[RankProblem]) -> tuple[RankProblem, ...]:
    """The facts that make the test fail, in order of blame.

    Where a rank failed as expected, what it did to its peers is expected too: they wait in vain, or pass unexpectedly.
    """
    problems = sorted(problems, key=lambda fact: fact.blame_order)
    real = [fact for fact in problems if fact.kind is not ProblemKind.FAILED_AS_EXPECTED]
    if len(real) == len(problems):
        return tuple(real)
    if any(fact.kind is ProblemKind.FAILED_AS_EXPECTED and fact.phase != "teardown" for fact in problems):
        real = [fact for fact in real if fact.kind is not ProblemKind.PASSED_UNEXPECTEDLY]
    return tuple(real) if any(not is_consequence(fact) for fact in real) else ()


def is_consequence(problem: RankProblem) -> bool:
    """Whether a peer's expected failure explains it."""
    return problem.kind in (ProblemKind.STOPPED, ProblemKind.SKIPPED) or problem.blame is BlameLevel.HUNG_IN_COLLECTIVE


def choose_reporting_phase(problem: RankProblem, failures: Sequence[RankProblem]) -> str:
    """The phase whose report tells of a real failure; ``real[0]`` is the cause.

    That of the cause, with two exceptions. A test that some rank did not get through never has its call told as passed
    because the cause is in a teardown; and a failure in teardown that no peer's failure explains is told as such.
    """
    cause = failures[0]
    if cause.phase == "teardown":
        return "teardown" if problem.phase == "teardown" else "call"
    if problem.phase != "teardown" or problem.kind in (ProblemKind.HUNG, ProblemKind.STOPPED):
        return cause.phase
    failing = {other.rank for other in failures if other.phase == cause.phase and other.kind is not ProblemKind.STOPPED}
    alone = (
        problem.kind in (ProblemKind.MISSING_REPORT, ProblemKind.LEFT_BEHIND)
        or problem.at_ns < cause.at_ns
        or problem.rank in failing
    )
    return "teardown" if alone else cause.phase
