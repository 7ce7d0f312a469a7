"""What keeps ranks from passing, as facts: read from what they told and from how they ended, put in order of blame."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import pytest

from zharness.items.told import PHASES, Told
from zharness.items.words import first_line, without_addresses
from zharness.world.messages import Note
from zharness.world.outcome import MISMATCH, End, GroupOutcome, RankOutcome
from zharness.world.stacks import without_machinery

FATAL = "Fatal Python error"  # faulthandler's first words
STRICT = "[XPASS(strict)]"  # pytest's only sign of a strict xfail mark whose test passed
# How the server places a death; the phase says more than the first.
_BEFORE_RETURN = ", before its function had returned"
_AFTER_RETURN = ", after its function had returned"


class Kind(Enum):
    """The ways not to pass."""

    FAILED = "failed"
    PASSED_UNEXPECTEDLY = "passed unexpectedly"  # under a strict xfail mark
    FAILED_AS_EXPECTED = "failed as expected"
    SKIPPED = "skipped"  # while other ranks did not
    DIED = "died"
    BROKE = "broke"  # the machinery around the test raised
    HUNG = "hung"
    STOPPED = "stopped"
    SILENT = "silent"  # returned without having told of every phase
    LEFT_BEHIND = "left behind"


class Blame(Enum):
    """Which facts come before which, whatever the clocks say; within one level the first in time comes first.

    A peer notices the closed connection of a dead rank before the server notices the death. A rank that hangs without
    waiting for anybody is one for which the others wait.
    """

    DEATH = 0
    MACHINERY = 1
    TOLD = 2
    ABSENT = 3
    WAITING = 4
    LEFTOVER = 5
    STOPPED = 6


@dataclass(frozen=True)
class Fact:
    """One thing that kept one rank from passing.

    ``message`` is the exception of a report, the reason of a skip, and otherwise reads on after "rank 1 ". ``waiting``
    is the collective in which the rank stood, ``text`` what there is to read where there is no report, and ``reason``
    that of the xfail mark which expects it.
    """

    rank: int
    phase: str
    at_ns: int
    kind: Kind
    blame: Blame
    message: str
    waiting: str = ""
    text: str = ""
    reason: str = ""
    report: pytest.TestReport | None = None

    @property
    def order(self) -> tuple[int, int, int]:
        """Facts are blamed in this order."""
        return (self.blame.value, self.at_ns, self.rank)

    @property
    def likeness(self) -> tuple[object, ...]:
        """Equal for facts that are told once for all their ranks."""
        crash = getattr(self.report and self.report.longrepr, "reprcrash", None)
        place = (crash.path, crash.lineno) if crash is not None else None
        return (self.kind, self.phase, place, without_addresses(self.message), self.waiting)


@dataclass(frozen=True)
class Heard:
    """The report of one phase of one rank, and when the phase ended."""

    at_ns: int
    report: pytest.TestReport


@dataclass(frozen=True)
class Account:
    """One rank's end beside what it told, phase by phase; ``due`` are the phases it should have told of."""

    outcome: RankOutcome
    heard: Mapping[str, Heard]
    due: tuple[str, ...]

    @property
    def rank(self) -> int:
        return self.outcome.rank

    @property
    def missing(self) -> tuple[str, ...]:
        """The phases of which it did not tell, the first one first."""
        return tuple(phase for phase in self.due if phase not in self.heard)

    def latest(self, phase: str) -> pytest.TestReport | None:
        """Its report of ``phase`` or, where there is none, of the last phase before: reports accumulate."""
        until = PHASES[: PHASES.index(phase) + 1]
        return next((self.heard[one].report for one in reversed(until) if one in self.heard), None)


def accounts_of(item: pytest.Item, outcome: GroupOutcome) -> tuple[Account, ...]:
    """Every rank's account, in rank order."""
    return tuple(account_of(item, rank) for rank in outcome.ranks)


def account_of(item: pytest.Item, outcome: RankOutcome) -> Account:
    """A rank's reports made whole again. Its last word on a phase stands: subtests tell of the call before the test."""
    heard: dict[str, Heard] = {}
    for note in outcome.notes:
        told = told_in(note)
        if told is None:
            continue
        report = item.config.hook.pytest_report_from_serializable(config=item.config, data=told.report)
        if report is not None:
            heard[told.phase] = Heard(note.at_ns, report)
    set_up = "setup" not in heard or heard["setup"].report.passed
    called = set_up and not item.config.getoption("setuponly", False)
    return Account(outcome, heard, PHASES if called else ("setup", "teardown"))


def told_in(note: Note) -> Told | None:
    """What a note tells of a phase. Its bytes, unpickled anew for each caller, were written by a rank of our own."""
    told: Any = pickle.loads(note.payload)  # noqa: S301 - see the docstring
    return told if isinstance(told, Told) else None


def facts_of(accounts: Sequence[Account]) -> tuple[Fact, ...]:
    """Every fact of every rank. A group of no ranks is one too: nothing was tested."""
    if not accounts:
        return (Fact(0, "setup", 0, Kind.SILENT, Blame.TOLD, "was never started"),)
    unanimous = {phase for phase in PHASES if all(skipped(account, phase) for account in accounts)}
    facts: list[Fact] = []
    for account in accounts:
        told = [fact_told(account.rank, phase, heard) for phase, heard in account.heard.items()]
        told = [fact for fact in told if not (fact and fact.kind is Kind.SKIPPED and fact.phase in unanimous)]
        own = [fact for fact in told if fact is not None]
        facts += [*own, *facts_of_end(account, own)]
    return tuple(facts)


def skipped(account: Account, phase: str) -> bool:
    """Whether the rank told that it skipped in ``phase``; an expected failure is not a skip."""
    heard = account.heard.get(phase)
    return heard is not None and heard.report.skipped and not hasattr(heard.report, "wasxfail")


def fact_told(rank: int, phase: str, heard: Heard) -> Fact | None:
    """What a report says against passing."""
    report = heard.report
    if report.passed:
        return None
    kind, reason = Kind.FAILED, ""
    if report.skipped and hasattr(report, "wasxfail"):
        kind, reason = Kind.FAILED_AS_EXPECTED, report.wasxfail
    elif report.skipped:
        kind = Kind.SKIPPED
    elif isinstance(report.longrepr, str) and report.longrepr.startswith(STRICT):
        kind = Kind.PASSED_UNEXPECTEDLY
    return Fact(rank, phase, heard.at_ns, kind, Blame.TOLD, message_of(report), reason=reason, report=report)


def message_of(report: pytest.TestReport) -> str:
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


def facts_of_end(account: Account, told: Sequence[Fact]) -> list[Fact]:
    """What the end of a rank says against passing, beside what it told."""
    outcome = account.outcome
    failed = [fact for fact in told if fact.kind is Kind.FAILED]
    if outcome.end is End.STOPPED or outcome.end is End.HUNG:
        return [unfinished(account, blameless=not failed)]
    if outcome.end is not End.RETURNED:
        return [ended(account, failed)]
    facts = []
    if account.missing:
        words = f"told nothing of its {account.missing[0]}"
        facts.append(Fact(account.rank, account.missing[0], outcome.at_ns, Kind.SILENT, Blame.TOLD, words))
    if outcome.left_behind:
        words, text = "left behind: " + "; ".join(outcome.left_behind), "\n".join(outcome.left_behind)
        facts.append(Fact(account.rank, "teardown", outcome.at_ns, Kind.LEFT_BEHIND, Blame.LEFTOVER, words, text=text))
    return facts


def unfinished(account: Account, *, blameless: bool) -> Fact:
    """A rank that had to be ended."""
    outcome, (phase, where) = account.outcome, place_of_end(account)
    waiting = f", waiting in {outcome.site}" if outcome.site else ""
    if outcome.end is End.STOPPED:
        words = (outcome.end.value if blameless else "was stopped") + (waiting or f", {where}")
        return Fact(account.rank, phase, outcome.at_ns, Kind.STOPPED, Blame.STOPPED, words, outcome.site)
    words = f"{outcome.end.value}, {where}" + (f": {outcome.cause}" if outcome.cause else "")
    words += "" if outcome.site in outcome.cause else waiting
    blame = Blame.WAITING if outcome.site else Blame.ABSENT
    return Fact(account.rank, phase, outcome.at_ns, Kind.HUNG, blame, words, outcome.site)


def ended(account: Account, failed: Sequence[Fact]) -> Fact:
    """A rank that died, or whose machinery raised.

    What it failed of before, it told before; and machinery that raises behind the last phase, where the ranks leave
    together, raises because of a peer. Both are placed by the clock then.
    """
    outcome, (phase, where) = account.outcome, place_of_end(account)
    cause, *further = outcome.cause.split("\n")
    words = f"{outcome.end.value}: {cause}" if cause else outcome.end.value
    if _BEFORE_RETURN in words:
        words = words.replace(_BEFORE_RETURN, f", {where}")
    elif _AFTER_RETURN not in words:
        words = f"{words}, {where}"
    words = "\n".join([words, *further])
    kind = Kind.BROKE if outcome.end is End.RAISED else Kind.DIED
    blame = Blame.DEATH if kind is Kind.DIED else Blame.MACHINERY
    if failed or (kind is Kind.BROKE and not account.missing):
        blame = Blame.TOLD
    if outcome.exception == MISMATCH:  # found by the server; the ranks told what came of it
        blame, phase, words = Blame.DEATH, failed[0].phase if failed else phase, f"disagreed: {outcome.cause}"
    return Fact(account.rank, phase, outcome.at_ns, kind, blame, words, text=last_words(outcome))


def place_of_end(account: Account) -> tuple[str, str]:
    """The phase in which a rank ended, and in words."""
    if not account.missing:
        return "teardown", "after teardown"
    if account.outcome.phase in PHASES:
        return account.outcome.phase, f"in {account.outcome.phase}"
    return account.missing[0], f"before {account.missing[0]}"


def last_words(outcome: RankOutcome) -> str:
    """The traceback of machinery that raised, or the stack that Python wrote when it died."""
    if outcome.end is End.RAISED:
        return outcome.traceback.rstrip()
    errors = outcome.stack or "".join(part.text for part in outcome.printed if part.stream == "stderr")
    at = errors.rfind(FATAL)
    return without_machinery(errors[at:]) if at >= 0 else ""


EXCUSABLE = (Kind.DIED, Kind.BROKE, Kind.HUNG, Kind.SKIPPED, Kind.LEFT_BEHIND)


def excused(facts: Sequence[Fact], item: pytest.Item) -> tuple[Fact, ...]:
    """The facts as an xfail mark sees them: of what has no report, a mark that expects any failure expects it all."""
    reason = expectation(item) if any(fact.kind in EXCUSABLE for fact in facts) else None
    if reason is None:
        return tuple(facts)
    return tuple(
        replace(fact, kind=Kind.FAILED_AS_EXPECTED, reason=reason) if fact.kind in EXCUSABLE else fact for fact in facts
    )


def expectation(item: pytest.Item) -> str | None:
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


def real_failures(facts: Iterable[Fact]) -> tuple[Fact, ...]:
    """The facts that make the test fail, in order of blame.

    Where a rank failed as expected, what it did to its peers is expected too: they wait in vain, or pass unexpectedly.
    """
    facts = sorted(facts, key=lambda fact: fact.order)
    real = [fact for fact in facts if fact.kind is not Kind.FAILED_AS_EXPECTED]
    if len(real) == len(facts):
        return tuple(real)
    if any(fact.kind is Kind.FAILED_AS_EXPECTED and fact.phase != "teardown" for fact in facts):
        real = [fact for fact in real if fact.kind is not Kind.PASSED_UNEXPECTEDLY]
    return tuple(real) if any(not is_consequence(fact) for fact in real) else ()


def is_consequence(fact: Fact) -> bool:
    """Whether a peer's expected failure explains it."""
    return fact.kind in (Kind.STOPPED, Kind.SKIPPED) or fact.blame is Blame.WAITING


def home(fact: Fact, real: Sequence[Fact]) -> str:
    """The phase whose report tells of a real failure; ``real[0]`` is the cause.

    That of the cause, with two exceptions. A test that some rank did not get through never has its call told as passed
    because the cause is in a teardown; and a failure in teardown that no peer's failure explains is told as such.
    """
    cause = real[0]
    if cause.phase == "teardown":
        return "teardown" if fact.phase == "teardown" else "call"
    if fact.phase != "teardown" or fact.kind in (Kind.HUNG, Kind.STOPPED):
        return cause.phase
    failing = {other.rank for other in real if other.phase == cause.phase and other.kind is not Kind.STOPPED}
    alone = fact.kind in (Kind.SILENT, Kind.LEFT_BEHIND) or fact.at_ns < cause.at_ns or fact.rank in failing
    return "teardown" if alone else cause.phase
