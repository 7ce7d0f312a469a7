"""Derive from the ranks' reports and ends the problems that kept a test from passing, and order them by blame."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import pytest

from zharness.pytest_ranks.example_verdict import find_common_failure
from zharness.pytest_ranks.phase_report import PHASES, PhaseReport
from zharness.pytest_ranks.rank_text import first_line, mask_addresses
from zharness.world.messages import RankNote
from zharness.world.outcome import MISMATCH_EXCEPTION, GroupOutcome, RankEnd, RankOutcome
from zharness.world.process_group import PEER_LOST_MESSAGES
from zharness.world.stacks import strip_harness_frames

FATAL_ERROR_PREFIX = "Fatal Python error"  # the start of faulthandler's output
STRICT_XPASS_PREFIX = "[XPASS(strict)]"  # only this text shows that a test passed under a strict xfail mark
# Parts of the server's messages about a crash. The first is replaced by the phase of the test, which is more precise.
_BEFORE_RETURN = ", before its function had returned"
_AFTER_RETURN = ", after its function had returned"


class ProblemKind(Enum):
    """The kinds of problems that prevent a rank from passing. Failure messages contain the values of the members."""

    FAILED = "failed"
    PASSED_UNEXPECTEDLY = "passed unexpectedly"  # under a strict xfail mark
    FAILED_AS_EXPECTED = "failed as expected"
    SKIPPED = "skipped"  # while other ranks did not skip
    DIED = "died"
    HARNESS_ERROR = "hit a harness error"  # code around the test raised, not the test
    HUNG = "hung"
    STOPPED = "stopped"
    MISSING_REPORT = "sent no report"  # returned without a report of each phase
    LEFT_BEHIND = "left behind"


class BlameLevel(Enum):
    """Priority for choosing the cause of a failure: problems of the lowest level first, then the earliest problem.

    Time alone would blame the wrong rank: the other ranks see the closed connection of a crashed rank before the server
    sees the crash. If several ranks hang, a rank that is not in a collective is blamed, because the others wait for it.
    """

    DEATH = 0
    HARNESS_ERROR = 1
    REPORTED = 2
    PEER_LOST = 3  # a collective failed because another rank closed its connection
    HUNG_ALONE = 4
    HUNG_IN_COLLECTIVE = 5
    LEFTOVER = 6
    STOPPED = 7


@dataclass(frozen=True)
class RankProblem:
    """One reason why one rank did not pass.

    ``message`` is the exception message of a failed report, the reason of a skip, or otherwise a predicate that follows
    "rank 1 ". ``pending_collective`` is the collective in which the rank waited. ``details`` is a traceback or stack if
    there is no report. ``xfail_reason`` is the reason of the xfail mark that expects the problem.
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
        """Return a sort key for problems: the problem with the smallest key is the cause of the failure."""
        return (self.blame.value, self.at_ns, self.rank)

    @property
    def group_key(self) -> tuple[object, ...]:
        """Return a key by which problems are grouped: one report covers the problems of all ranks with equal keys."""
        crash = getattr(self.report and self.report.longrepr, "reprcrash", None)
        location = (crash.path, crash.lineno) if crash is not None else None
        return (self.kind, self.phase, location, mask_addresses(self.message), self.pending_collective)


@dataclass(frozen=True)
class TimedReport:
    """The report of one phase on one rank, and the time when the phase ended (CLOCK_MONOTONIC, in nanoseconds)."""

    at_ns: int
    report: pytest.TestReport


@dataclass(frozen=True)
class RankResult:
    """The result of one test on one rank: how it ended, its reports by phase, and the phases that it had to report."""

    outcome: RankOutcome
    timed_reports: Mapping[str, TimedReport]
    expected_phases: tuple[str, ...]

    @property
    def rank(self) -> int:
        """Return the number of the rank."""
        return self.outcome.rank

    @property
    def missing_phases(self) -> tuple[str, ...]:
        """Return the phases that the rank had to report but did not report, in the order in which they run."""
        return tuple(phase for phase in self.expected_phases if phase not in self.timed_reports)

    def latest_report(self, phase: str) -> pytest.TestReport | None:
        """Return the rank's report of ``phase`` or, if there is none, its report of the latest earlier phase."""
        phases = PHASES[: PHASES.index(phase) + 1]
        return next((self.timed_reports[name].report for name in reversed(phases) if name in self.timed_reports), None)


def collect_rank_results(item: pytest.Item, outcome: GroupOutcome) -> tuple[RankResult, ...]:
    """Return the result of the test on every rank, in rank order."""
    return tuple(make_rank_result(item, rank) for rank in outcome.ranks)


def make_rank_result(item: pytest.Item, outcome: RankOutcome) -> RankResult:
    """Return the result of one rank. If a phase has several reports, keep only the last report."""
    timed_reports: dict[str, TimedReport] = {}
    for note in outcome.notes:
        phase_report = load_phase_report(note)
        if phase_report is None:
            continue
        report = item.config.hook.pytest_report_from_serializable(config=item.config, data=phase_report.report)
        if report is not None:
            timed_reports[phase_report.phase] = TimedReport(note.at_ns, report)
    is_set_up = "setup" not in timed_reports or timed_reports["setup"].report.passed
    is_called = is_set_up and not item.config.getoption("setuponly", False)
    return RankResult(outcome, timed_reports, PHASES if is_called else ("setup", "teardown"))


def load_phase_report(note: RankNote) -> PhaseReport | None:
    """Unpickle a note that a rank sent; return None if the note is not a phase report."""
    payload: Any = pickle.loads(note.payload)  # noqa: S301 - written by a rank that this process started
    return payload if isinstance(payload, PhaseReport) else None


def find_problems(rank_results: Sequence[RankResult]) -> tuple[RankProblem, ...]:
    """Return every problem of every rank. If there are no ranks, return a problem too, because nothing was tested."""
    if not rank_results:
        return (RankProblem(0, "setup", 0, ProblemKind.MISSING_REPORT, BlameLevel.REPORTED, "was never started"),)
    skipped_phases = {phase for phase in PHASES if all(is_skipped(result, phase) for result in rank_results)}
    problems: list[RankProblem] = []
    for rank_result in rank_results:
        reported = [
            problem
            for phase, timed_report in rank_result.timed_reports.items()
            if (problem := make_reported_problem(rank_result.rank, phase, timed_report)) is not None
            and not (problem.kind is ProblemKind.SKIPPED and phase in skipped_phases)
        ]
        problems += [*reported, *find_end_problems(rank_result, reported)]
    return tuple(problems)


def is_skipped(rank_result: RankResult, phase: str) -> bool:
    """Return whether the rank skipped in ``phase``. Expected failures are no skips, though pytest reports skips."""
    timed_report = rank_result.timed_reports.get(phase)
    return timed_report is not None and timed_report.report.skipped and not hasattr(timed_report.report, "wasxfail")


def make_reported_problem(rank: int, phase: str, timed_report: TimedReport) -> RankProblem | None:
    """Return the problem that a failed or skipped report describes; return None for a passed report."""
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
    message = get_report_message(report)
    is_peer_lost = kind is ProblemKind.FAILED and any(lost in message for lost in PEER_LOST_MESSAGES)
    return RankProblem(
        rank,
        phase,
        timed_report.at_ns,
        kind,
        BlameLevel.PEER_LOST if is_peer_lost else BlameLevel.REPORTED,
        message,
        xfail_reason=reason,
        report=report,
    )


def get_report_message(report: pytest.TestReport) -> str:
    """Return the exception message of a failed report, or the reason of a skipped report."""
    longrepr = report.longrepr
    if isinstance(longrepr, tuple):
        return str(longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(longrepr, "reprcrash", None)
    if crash is not None:
        return find_common_failure(str(crash.message)) or str(crash.message)
    # The failure is plain text for a missing fixture or an item of another plugin; pytest marks error lines with "E ".
    lines = str(longrepr or f"{report.outcome} without a message").splitlines()
    return next((line[1:].strip() for line in lines if line.startswith("E ")), first_line("\n".join(lines)))


def find_end_problems(rank_result: RankResult, reported_problems: Sequence[RankProblem]) -> list[RankProblem]:
    """Return the problems that follow from how a rank ended.

    ``reported_problems`` are the problems that follow from the rank's reports; they are not returned again.
    """
    outcome = rank_result.outcome
    failures = [problem for problem in reported_problems if problem.kind is ProblemKind.FAILED]
    if outcome.end is RankEnd.STOPPED or outcome.end is RankEnd.HUNG:
        return [make_unfinished_problem(rank_result, is_blameless=not failures)]
    if outcome.end is not RankEnd.RETURNED:
        return [make_crash_problem(rank_result, failures)]
    problems = []
    if rank_result.missing_phases:
        message = f"sent no report of its {rank_result.missing_phases[0]}"
        problems.append(
            RankProblem(
                rank_result.rank,
                rank_result.missing_phases[0],
                outcome.at_ns,
                ProblemKind.MISSING_REPORT,
                BlameLevel.REPORTED,
                message,
            )
        )
    if outcome.leftovers:
        message, details = "left behind: " + "; ".join(outcome.leftovers), "\n".join(outcome.leftovers)
        problems.append(
            RankProblem(
                rank_result.rank,
                "teardown",
                outcome.at_ns,
                ProblemKind.LEFT_BEHIND,
                BlameLevel.LEFTOVER,
                message,
                details=details,
            )
        )
    return problems


def make_unfinished_problem(rank_result: RankResult, *, is_blameless: bool) -> RankProblem:
    """Return the problem of a rank that hung or was stopped.

    ``is_blameless`` is True if the rank had reported no failure.
    """
    outcome, (phase, where) = rank_result.outcome, locate_end(rank_result)
    waiting = f", waiting in {outcome.site}" if outcome.site else ""
    if outcome.end is RankEnd.STOPPED:
        message = (outcome.end.value if is_blameless else "was stopped") + (waiting or f", {where}")
        return RankProblem(
            rank_result.rank, phase, outcome.at_ns, ProblemKind.STOPPED, BlameLevel.STOPPED, message, outcome.site
        )
    message = f"{outcome.end.value}, {where}" + (f": {outcome.cause}" if outcome.cause else "")
    message += "" if outcome.site in outcome.cause else waiting
    blame = BlameLevel.HUNG_IN_COLLECTIVE if outcome.site else BlameLevel.HUNG_ALONE
    return RankProblem(rank_result.rank, phase, outcome.at_ns, ProblemKind.HUNG, blame, message, outcome.site)


def make_crash_problem(rank_result: RankResult, reported_failures: Sequence[RankProblem]) -> RankProblem:
    """Return the problem of a rank that died, or on which the code that runs the test raised an exception.

    Normally a crash is blamed before all reported failures. Crashes are ordered by time instead if the rank had
    reported a failure earlier, or if the harness raised after the last phase: ranks wait for each other there, so
    another rank is the cause.
    """
    outcome, (phase, where) = rank_result.outcome, locate_end(rank_result)
    cause, *further = outcome.cause.split("\n")
    message = f"{outcome.end.value}: {cause}" if cause else outcome.end.value
    if _BEFORE_RETURN in message:
        message = message.replace(_BEFORE_RETURN, f", {where}")
    elif _AFTER_RETURN not in message:
        message = f"{message}, {where}"
    message = "\n".join([message, *further])
    kind = ProblemKind.HARNESS_ERROR if outcome.end is RankEnd.RAISED else ProblemKind.DIED
    blame = BlameLevel.DEATH if kind is ProblemKind.DIED else BlameLevel.HARNESS_ERROR
    if reported_failures or (kind is ProblemKind.HARNESS_ERROR and not rank_result.missing_phases):
        blame = BlameLevel.REPORTED
    if outcome.exception == MISMATCH_EXCEPTION:  # the server found the cause; the ranks reported only its consequences
        blame, phase, message = (
            BlameLevel.DEATH,
            reported_failures[0].phase if reported_failures else phase,
            f"disagreed: {outcome.cause}",
        )
    return RankProblem(rank_result.rank, phase, outcome.at_ns, kind, blame, message, details=get_crash_text(outcome))


def locate_end(rank_result: RankResult) -> tuple[str, str]:
    """Return the phase in which a rank ended, and a phrase such as "in call" or "before setup"."""
    if not rank_result.missing_phases:
        return "teardown", "after teardown"
    if rank_result.outcome.phase in PHASES:
        return rank_result.outcome.phase, f"in {rank_result.outcome.phase}"
    return rank_result.missing_phases[0], f"before {rank_result.missing_phases[0]}"


def get_crash_text(outcome: RankOutcome) -> str:
    """Return the traceback of an exception outside of the test, or the stack that faulthandler wrote at a crash."""
    if outcome.end is RankEnd.RAISED:
        return outcome.traceback.rstrip()
    errors = outcome.stack or "".join(part.text for part in outcome.captured_output if part.stream == "stderr")
    start = errors.rfind(FATAL_ERROR_PREFIX)
    return strip_harness_frames(errors[start:]) if start >= 0 else ""


XFAIL_KINDS = (
    ProblemKind.DIED,
    ProblemKind.HARNESS_ERROR,
    ProblemKind.HUNG,
    ProblemKind.SKIPPED,
    ProblemKind.LEFT_BEHIND,
)


def apply_xfail_mark(problems: Sequence[RankProblem], item: pytest.Item) -> tuple[RankProblem, ...]:
    """Turn crashes, hangs, partial skips and leftovers into expected failures if an xfail mark expects any failure.

    pytest itself applies the mark on each rank, but only to exceptions that the test raised.
    """
    reason = get_xfail_reason(item) if any(problem.kind in XFAIL_KINDS for problem in problems) else None
    if reason is None:
        return tuple(problems)
    return tuple(
        replace(problem, kind=ProblemKind.FAILED_AS_EXPECTED, xfail_reason=reason)
        if problem.kind in XFAIL_KINDS
        else problem
        for problem in problems
    )


def get_xfail_reason(item: pytest.Item) -> str | None:
    """Return the reason of the item's xfail mark.

    Returns None if the mark's condition does not hold, or if the mark has ``raises`` or ``run=False``.
    """
    # There is no public function that evaluates the conditions of xfail marks.
    from _pytest.skipping import evaluate_xfail_marks

    if item.config.getoption("runxfail", False):
        return None
    try:
        mark = evaluate_xfail_marks(item)
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 - ranks have reported the faulty condition
        return None
    return mark.reason if mark is not None and mark.run and mark.raises is None else None


def select_failures(problems: Iterable[RankProblem]) -> tuple[RankProblem, ...]:
    """Return the problems that make the test fail, in order of blame.

    If a rank failed as expected, the consequences for the other ranks do not count as failures: those ranks were
    stopped while they waited for the failed rank, or passed unexpectedly.
    """
    problems = sorted(problems, key=lambda problem: problem.blame_order)
    failures = [problem for problem in problems if problem.kind is not ProblemKind.FAILED_AS_EXPECTED]
    if len(failures) == len(problems):
        return tuple(failures)
    if any(problem.kind is ProblemKind.FAILED_AS_EXPECTED and problem.phase != "teardown" for problem in problems):
        failures = [problem for problem in failures if problem.kind is not ProblemKind.PASSED_UNEXPECTEDLY]
    return tuple(failures) if any(not is_consequence(problem) for problem in failures) else ()


def is_consequence(problem: RankProblem) -> bool:
    """Return whether the expected failure of another rank may have caused the problem."""
    return problem.kind in (ProblemKind.STOPPED, ProblemKind.SKIPPED) or problem.blame is BlameLevel.HUNG_IN_COLLECTIVE


def choose_reporting_phase(problem: RankProblem, failures: Sequence[RankProblem]) -> str:
    """Return the phase whose merged report shows ``problem``; ``failures[0]`` is the cause of the test's failure.

    This phase is the phase of the cause, with two exceptions. If the cause is in teardown, problems of earlier phases
    are shown in the call, so that a call that one rank did not finish is never reported as passed. A teardown failure
    that no failure of another rank explains is shown in teardown.
    """
    cause = failures[0]
    if cause.phase == "teardown":
        return "teardown" if problem.phase == "teardown" else "call"
    if problem.phase != "teardown" or problem.kind in (ProblemKind.HUNG, ProblemKind.STOPPED):
        return cause.phase
    failed_ranks = {
        other.rank for other in failures if other.phase == cause.phase and other.kind is not ProblemKind.STOPPED
    }
    is_independent = (
        problem.kind in (ProblemKind.MISSING_REPORT, ProblemKind.LEFT_BEHIND)
        or problem.at_ns < cause.at_ns
        or problem.rank in failed_ranks
    )
    return "teardown" if is_independent else cause.phase
