"""The clean record, a count of cells on engines without known bugs, where every broken law is a false alarm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zharness.parity import Tier
from zharness.run import Record, Verdict
from zharness.run.matching_failures import list_similar_entries

CONFIDENCE = 0.95
BOUNDED_TIERS = (Tier.EXACT.value, Tier.STAGED.value)
BISECTION_STEPS = 60  # 60 halvings of an interval of length 1 reach the precision of float64


@dataclass(frozen=True)
class CleanRecord:
    """The number of judged cells, the false alarms among these cells, and the cells without a decision.

    ``bounded_count`` is the number of judged cells in which every comparison was at tier X or S, whose bounds follow
    from arithmetic.
    """

    judged_count: int
    bounded_count: int
    false_alarms: tuple[Record, ...]
    expected_failure_count: int
    unsupported_count: int
    errors: tuple[Record, ...]

    @property
    def false_alarm_rate_bound(self) -> float:
        """The upper limit of the rate of false alarms at 95 % confidence, as ``upper_bound`` computes it."""
        return upper_bound(len(self.false_alarms), self.judged_count)

    def describe(self) -> str:
        """Return a line that summarizes the counts, followed by the lines of each false alarm and each error."""
        head = (
            f"{len(self.false_alarms)} false alarms in {self.judged_count} clean cells: "
            f"below {100 * self.false_alarm_rate_bound:.3g} % with 95 % confidence; "
            f"{self.bounded_count} of them at tier X or S "
            f"({self.expected_failure_count} excused, {self.unsupported_count} unsupported, {len(self.errors)} errors)"
        )
        return "\n".join([head, *map(describe_alarm, self.false_alarms + self.errors)])


def describe_alarm(record: Record) -> str:
    """Return lines with the verdict, command and cause of ``record``, and with the known failures that it resembles.

    It stays an alarm until an expected failure covers its cell.
    """
    similar = list_similar_entries(
        record.cell, record.engine_version, record.verdict.value, record.cause, record.details
    )
    known = [f"  like {entry.location}: {', '.join(entry.laws)}: {entry.reason}" for entry in similar]
    return "\n".join([f"{record.verdict.value} {record.command}", f"  {record.cause}", *known])


def make_clean_record(records: Sequence[Record]) -> CleanRecord:
    """Make a CleanRecord of ``records``.

    A cell with an expected failure shows a known bug of an engine, so it counts neither as judged nor as a false alarm.
    """
    unexpected = [record for record in records if not record.expected_failure]
    judged = [r for r in unexpected if r.verdict in (Verdict.PASS, Verdict.CONTRACT) or r.verdict.is_broken]
    return CleanRecord(
        judged_count=len(judged),
        bounded_count=sum(record.tier in BOUNDED_TIERS for record in judged),
        false_alarms=tuple(record for record in judged if record.verdict.is_broken),
        expected_failure_count=sum(bool(record.expected_failure) for record in records),
        unsupported_count=sum(record.verdict is Verdict.UNSUPPORTED for record in records),
        errors=tuple(record for record in records if record.verdict is Verdict.ERROR),
    )


def upper_bound(events: int, trials: int) -> float:
    """Return the upper limit of a one-sided 95 % confidence interval for the rate of events.

    ``events`` is the number of events seen in ``trials`` trials. The limit is that of Clopper and Pearson (1934): the
    largest rate at which at most this many events have a probability of 5 %. If ``events`` is 0, the limit is close to
    3 / ``trials``, which is known as the rule of three.
    """
    if events >= trials:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(BISECTION_STEPS):
        rate = (low + high) / 2
        if binomial_cdf(events, trials, rate) > 1 - CONFIDENCE:
            low = rate
        else:
            high = rate
    return high


def binomial_cdf(events: int, trials: int, rate: float) -> float:
    """Return the probability of at most ``events`` events in ``trials`` trials.

    ``rate`` is the probability of an event in one trial, between 0 and 1 (exclusive).
    """
    logs = (
        math.lgamma(trials + 1)
        - math.lgamma(k + 1)
        - math.lgamma(trials - k + 1)
        + k * math.log(rate)
        + (trials - k) * math.log1p(-rate)
        for k in range(events + 1)
    )
    return math.fsum(math.exp(log) for log in logs)
