"""The clean record: cells on engines that are right, in which every broken law is a false alarm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zharness.parity import Tier
from zharness.run import Record, Verdict

CONFIDENCE = 0.95
BOUNDED = (Tier.EXACT.value, Tier.STAGED.value)
HALVINGS = 60  # of an interval of length 1: below any float that matters here


@dataclass(frozen=True)
class CleanRecord:
    """Counts over records: cells that were judged, those that gave a false alarm, and those that say nothing.

    ``bounded`` of the judged ones were compared at tier X or S throughout, by a bound that follows from arithmetic.
    """

    judged: int
    bounded: int
    alarms: tuple[Record, ...]
    excused: int
    unsupported: int
    errors: tuple[Record, ...]

    @property
    def bound(self) -> float:
        """The rate of false alarms is below this with a confidence of 95 %; see ``upper_bound``."""
        return upper_bound(len(self.alarms), self.judged)

    def words(self) -> str:
        """One line, and one for each alarm and error."""
        head = (
            f"{len(self.alarms)} false alarms in {self.judged} clean cells: below {100 * self.bound:.3g} % "
            f"with 95 % confidence; {self.bounded} of them at tier X or S "
            f"({self.excused} excused, {self.unsupported} unsupported, {len(self.errors)} errors)"
        )
        rest = [f"{record.verdict.value} {record.command}\n  {record.cause}" for record in self.alarms + self.errors]
        return "\n".join([head, *rest])


def clean_record(records: Sequence[Record]) -> CleanRecord:
    """What ``records`` say; an excused cell is a known bug of an engine, so neither clean nor an alarm."""
    unknown = [record for record in records if not record.excuse]
    judged = [r for r in unknown if r.verdict in (Verdict.PASS, Verdict.CONTRACT) or r.verdict.broken]
    return CleanRecord(
        judged=len(judged),
        bounded=sum(record.tier in BOUNDED for record in judged),
        alarms=tuple(record for record in judged if record.verdict.broken),
        excused=sum(bool(record.excuse) for record in records),
        unsupported=sum(record.verdict is Verdict.UNSUPPORTED for record in records),
        errors=tuple(record for record in records if record.verdict is Verdict.ERROR),
    )


def upper_bound(events: int, trials: int) -> float:
    """The largest rate at which so few events still have a probability of 5 % (Clopper and Pearson 1934, one-sided).

    Without events it is close to 3 / trials, the rule of three.
    """
    if events >= trials:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        rate = (low + high) / 2
        if at_most(events, trials, rate) > 1 - CONFIDENCE:
            low = rate
        else:
            high = rate
    return high


def at_most(events: int, trials: int, rate: float) -> float:
    """The probability of at most ``events`` among ``trials``, each with the probability ``rate``, 0 < rate < 1."""
    logs = (
        math.lgamma(trials + 1)
        - math.lgamma(k + 1)
        - math.lgamma(trials - k + 1)
        + k * math.log(rate)
        + (trials - k) * math.log1p(-rate)
        for k in range(events + 1)
    )
    return math.fsum(math.exp(each) for each in logs)
