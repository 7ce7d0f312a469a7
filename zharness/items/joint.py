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

from zharness.items import longreprs, merged
from zharness.items.facts import (
    Account,
    Fact,
    Kind,
    accounts_of,
    excused,
    facts_of,
    home,
    message_of,
    real_failures,
    skipped,
)
from zharness.items.told import PHASES
from zharness.items.words import first_line, ranks_in_words, subject_and, without_addresses
from zharness.world.outcome import End, GroupOutcome
from zharness.world.stacks import without_machinery

Group = tuple[Fact, ...]  # facts that are alike, one for each of several ranks

_BECAUSE = " because another rank had failed"
# What a joint report has of its own; anything else that a plugin set on a rank's report is handed on.
_OWN_FIELDS = {
    *("nodeid", "location", "keywords", "outcome", "longrepr", "when", "sections", "duration", "start", "stop"),
    *("user_properties", "wasxfail", "$report_type"),
}


@dataclass(frozen=True)
class Joint:
    """All that is known of one test on all its ranks; ``real`` are the facts that make it fail, the cause first."""

    item: pytest.Item
    accounts: tuple[Account, ...]
    facts: tuple[Fact, ...]
    real: tuple[Fact, ...]
    seconds: float

    @cached_property
    def placed(self) -> dict[str, list[Fact]]:
        """The real failures by the phase whose report tells of them, in order of blame."""
        found: dict[str, list[Fact]] = {}
        for fact in self.real:
            found.setdefault(home(fact, self.real), []).append(fact)
        return found

    @cached_property
    def skipping(self) -> bool:
        """Whether the cause is a skip: nobody has failed then, and ranks that were stopped waited for one that left."""
        return bool(self.real) and self.real[0].kind is Kind.SKIPPED

    def reports(self, phase: str) -> list[pytest.TestReport]:
        """What ranks told of ``phase``, in rank order."""
        return [account.heard[phase].report for account in self.accounts if phase in account.heard]


@dataclass(frozen=True)
class Verdict:
    """What became of one phase. ``expected`` is the reason of the xfail mark, where one had its part in it."""

    outcome: Literal["passed", "failed", "skipped"]
    longrepr: Any = None
    expected: str | None = None
    report: pytest.TestReport | None = field(default=None, repr=False)  # whose further attributes are kept


def joint_reports(item: pytest.Item, outcome: GroupOutcome) -> list[pytest.TestReport]:
    """The reports of setup, call (unless setup stopped the test) and teardown, for pytest_runtest_logreport."""
    accounts = accounts_of(item, outcome)
    facts = excused(facts_of(accounts), item)
    joint = Joint(item, accounts, facts, real_failures(facts), outcome.seconds)
    verdicts = {"setup": setup_verdict(joint)}
    if verdicts["setup"].outcome == "passed" and ("call" in joint.placed or joint.reports("call")):
        verdicts["call"] = verdict(joint, "call")
    verdicts["teardown"] = verdict(joint, "teardown")
    reports: list[pytest.TestReport] = []
    for phase in verdicts:
        reports.append(made(joint, phase, verdicts, reports))
    return reports


def setup_verdict(joint: Joint) -> Verdict:
    """That of setup. A call that failed on some rank needs a setup that passed, or it would not be shown."""
    if "call" in joint.placed and "setup" not in joint.placed:
        return Verdict("passed")
    return verdict(joint, "setup")


def verdict(joint: Joint, phase: str) -> Verdict:
    """Failed if a real failure has its place here; else skipped by all, failed as expected by one, or passed."""
    if phase in joint.placed:
        return failed(joint, phase)
    if joint.accounts and all(skipped(account, phase) for account in joint.accounts):
        return Verdict("skipped", skip_by_all(joint, phase))
    told = joint.reports(phase)
    expected = sorted((fact for fact in joint.facts if is_expected(fact, phase)), key=lambda fact: fact.order)
    if expected:
        longrepr = shown(joint, expected, ranks_section(joint))
        return Verdict("skipped", longrepr, expected[0].reason, expected[0].report)
    unexpected = next((report.wasxfail for report in told if hasattr(report, "wasxfail")), None)
    return Verdict("passed", expected=unexpected)


def is_expected(fact: Fact, phase: str) -> bool:
    """Whether it is an expected failure in ``phase``."""
    return fact.kind is Kind.FAILED_AS_EXPECTED and fact.phase == phase


def failed(joint: Joint, phase: str) -> Verdict:
    """The failure of ``phase``: its first fact as the failure, and all that others have to say in sections."""
    placed = joint.placed[phase]
    groups = fold(placed)
    if placed[0].kind is Kind.PASSED_UNEXPECTEDLY and len(groups[0]) == len(joint.accounts):
        return Verdict("failed", placed[0].report and placed[0].report.longrepr, report=placed[0].report)
    sections = [*ranks_section(joint), *(section for group in groups[1:] for section in also(group))]
    if joint.real[0] in placed:
        sections += stacks(joint.accounts)
    return Verdict("failed", shown(joint, placed, sections), report=placed[0].report)


def fold(facts: Iterable[Fact]) -> list[Group]:
    """Equal facts of several ranks together, in the order of the first of each."""
    groups: dict[tuple[object, ...], Group] = {}
    for fact in facts:
        groups[fact.likeness] = (*groups.get(fact.likeness, ()), fact)
    return list(groups.values())


def shown(joint: Joint, facts: Sequence[Fact], sections: longreprs.Sections) -> Any:
    """The first of ``facts`` as the failure of a report."""
    group = fold(facts)[0]
    fact, words = group[0], headline(joint, group)
    if fact.report is None:
        place = longreprs.place_of(joint.item, f"({fact.waiting}) {fact.message}")
        return longreprs.built(joint.item, place, words, fact.text, sections)
    if isinstance(fact.report.longrepr, tuple):  # a skip
        file, line, _ = fact.report.longrepr
        return longreprs.built(joint.item, (str(file), line), words, "", sections)
    return longreprs.named(joint.item, fact.report, words, sections)


def headline(joint: Joint, group: Group) -> str:
    """What the short summary says: which ranks, and what."""
    fact, ranks = group[0], [fact.rank for fact in group]
    if fact.report is None:
        return subject_and(ranks, spoken(joint, fact))
    if isinstance(fact.report.longrepr, tuple):
        return skip_by_some(joint, fact.phase)
    return f"{ranks_in_words(ranks)}: {fact.message}"


def skip_by_some(joint: Joint, phase: str) -> str:
    """Who skipped in ``phase``, why, and what became of the others."""
    skips = [fact for fact in joint.facts if isinstance(getattr(fact.report, "longrepr", None), tuple)]
    skips = [fact for fact in skips if fact.phase == phase]
    ranks = {fact.rank for fact in skips}
    why = by_ranks({fact.rank: fact.message for fact in skips})
    others = fates(joint, [account for account in joint.accounts if account.rank not in ranks])
    return f"skipped on {ranks_in_words(ranks)} of {len(joint.accounts)} only: {'; '.join([why, *others])}"


def skip_by_all(joint: Joint, phase: str) -> tuple[str, int, str]:
    """The skip of the first rank, with the reasons of all."""
    reports = joint.reports(phase)
    longrepr = reports[0].longrepr
    file, line = (longrepr[0], longrepr[1]) if isinstance(longrepr, tuple) else longreprs.place_of(joint.item)
    reasons = {account.rank: message_of(report) for account, report in zip(joint.accounts, reports, strict=True)}
    return str(file), line, f"Skipped: {by_ranks(reasons)}"


def by_ranks(texts: dict[int, str]) -> str:
    """The text if it is one, else each with its ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    if len(ranks) == 1:
        return next(iter(ranks))
    return ", ".join(f"{text} ({ranks_in_words(those)})" for text, those in ranks.items())


def ranks_section(joint: Joint) -> list[tuple[str, str]]:
    """One line for each way in which ranks ended."""
    return [("Ranks", "\n".join(fates(joint, joint.accounts)))] if joint.accounts else []


def fates(joint: Joint, accounts: Sequence[Account]) -> list[str]:
    """What became of each rank in words, that of the cause first, equal ones folded."""
    cause = joint.real[0].rank if joint.real else -1
    alike: dict[tuple[object, ...], list[Account]] = {}
    for account in sorted(accounts, key=lambda account: account.rank != cause):
        own = facts_on(joint, account.rank)
        alike.setdefault(tuple(fact.likeness for fact in own) or plain_fate(account), []).append(account)
    return [subject_and([account.rank for account in group], *fate(joint, group[0])) for group in alike.values()]


def fate(joint: Joint, account: Account) -> tuple[str, ...]:
    """What became of one rank, one thing after the other."""
    own = facts_on(joint, account.rank)
    return tuple(in_words(joint, fact) for fact in own) or plain_fate(account)


def facts_on(joint: Joint, rank: int) -> list[Fact]:
    """The facts of one rank in the order in which they came about."""
    own = [fact for fact in joint.facts if fact.rank == rank]
    return sorted(own, key=lambda fact: (PHASES.index(fact.phase), fact.at_ns))


def plain_fate(account: Account) -> tuple[str, ...]:
    """That of a rank which nothing kept from passing."""
    if any(skipped(account, phase) for phase in PHASES):
        return ("skipped",)
    unexpected = any(hasattr(heard.report, "wasxfail") for heard in account.heard.values())
    return ("passed unexpectedly",) if unexpected else ("passed",)


def in_words(joint: Joint, fact: Fact) -> str:
    """A fact in one line that reads on after "rank 1 "."""
    if fact.report is None:
        return first_line(spoken(joint, fact))
    first = fact.kind is Kind.FAILED and bool(joint.real) and fact.likeness == joint.real[0].likeness
    # A partial skip that an xfail mark expects is still told as the skip that it is.
    verb = Kind.SKIPPED.value if isinstance(fact.report.longrepr, tuple) else fact.kind.value
    return f"{verb}{' first,' if first else ''} in {fact.phase}: {first_line(fact.message)}"


def spoken(joint: Joint, fact: Fact) -> str:
    """The message of a fact that has no report."""
    return fact.message.replace(_BECAUSE, "") if joint.skipping else fact.message


def also(group: Group) -> list[tuple[str, str]]:
    """The section of a failure beside the first, if there is more to read of it than its line."""
    fact, who = group[0], ranks_in_words([fact.rank for fact in group])
    if fact.kind is Kind.LEFT_BEHIND:
        return [(f"left behind by {who}", fact.text)]
    if fact.report is not None and not isinstance(fact.report.longrepr, tuple):
        return [(f"{who}: also {fact.kind.value} in {fact.phase}", fact.report.longreprtext)]
    return [(f"{who}: also {fact.kind.value} in {fact.phase}", fact.text)] if fact.text else []


def stacks(accounts: Iterable[Account]) -> list[tuple[str, str]]:
    """Where the ranks stood that had to be ended; equal stacks once."""
    found: dict[str, list[Account]] = {}
    for account in accounts:
        outcome = account.outcome
        if outcome.stack.strip() and outcome.end in (End.HUNG, End.STOPPED, End.RAISED):
            found.setdefault(without_addresses(stack_of(account)), []).append(account)
    return [
        (f"stack of {ranks_in_words(account.rank for account in those)}", stack_of(those[0]))
        for those in found.values()
    ]


def stack_of(account: Account) -> str:
    """Its stack without the frames that every rank has; all of it where nothing else is left."""
    return without_machinery(account.outcome.stack) or account.outcome.stack.strip()


def made(
    joint: Joint, phase: str, verdicts: dict[str, Verdict], before: Sequence[pytest.TestReport]
) -> pytest.TestReport:
    """The report of one phase."""
    item, told, found = joint.item, joint.reports(phase), verdicts[phase]
    own = told[0] if told else None
    start, stop, duration = span(joint, phase, found, before)
    until = [*PHASES[: PHASES.index(phase) + 1], *(one for one in PHASES if one not in verdicts)]
    source = found.report or own
    extra = {name: value for name, value in vars(source).items() if name not in _OWN_FIELDS} if source else {}
    if found.expected is not None:
        extra["wasxfail"] = found.expected
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=own.location if own else item.location,
        keywords=own.keywords if own else dict.fromkeys(item.keywords, 1),
        outcome=found.outcome,
        longrepr=found.longrepr,
        when=phase,  # type: ignore[arg-type]  # one of the three
        sections=merged.sections(joint.accounts, phase, until),
        duration=duration,
        start=start,
        stop=stop,
        user_properties=merged.properties(joint.accounts, phase),
        **extra,
    )


def span(joint: Joint, phase: str, found: Verdict, before: Sequence[pytest.TestReport]) -> tuple[float, float, float]:
    """Start, stop and duration of a phase in seconds: from the first rank's start to the last rank's end.

    A phase of which no rank lived to tell takes what the group took beside the phases before.
    """
    told = joint.reports(phase)
    if told:
        starts, stops = [report.start for report in told], [report.stop for report in told]
        return min(starts), max(stops), max(report.duration for report in told)
    start = before[-1].stop if before else time.time() - joint.seconds
    spent = sum(report.duration for report in before)
    duration = 0.0 if found.outcome == "passed" else max(0.0, joint.seconds - spent)
    return start, start + duration, duration
