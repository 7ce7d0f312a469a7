"""What travels between a rank and its server while a piece of work runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class RankStatus(Enum):
    """What a note says of its rank: it goes on, it has failed, or it takes no further part (a skip)."""

    OK = "fine"
    FAILED = "failed"
    SKIPPED = "left"


@dataclass(frozen=True)
class RankNote:
    """Something a rank tells before its end: the report of one phase of a test, say.

    ``at_ns`` is CLOCK_MONOTONIC at the moment of what is told, not at that of the telling. ``payload`` is pickled.
    """

    rank: int
    at_ns: int
    status: RankStatus
    payload: bytes


@dataclass(frozen=True)
class ExchangeRequest:
    """A rank's contribution to an exchange; it waits until every rank's is in.

    ``ordinal`` counts this rank's exchanges, ``what`` is the function that it called, ``site`` where.
    """

    rank: int
    ordinal: int
    operation: str
    call_site: str
    value: bytes


@dataclass(frozen=True)
class CollectiveAnnouncement:
    """A collective that a rank is about to enter: its number on this rank, when, what it is, and where it is called."""

    rank: int
    ordinal: int
    at_ns: int
    operation: str
    call_site: str


@dataclass(frozen=True)
class DeadlineHold:
    """The deadline is off while a person looks at the rank (``reason``); the empty reason switches it on again."""

    rank: int
    reason: str


@dataclass(frozen=True)
class ExchangeResult:
    """The server's answer to a complete exchange: every rank's value, in rank order.

    ``ordinal`` is the asking rank's own: a rank that left an exchange by an exception finds its answer still there.
    """

    ordinal: int
    values: tuple[bytes, ...]


@dataclass(frozen=True)
class ExchangeFailure:
    """The server's answer to an exchange that cannot be completed, with the reason."""

    ordinal: int
    reason: str


@dataclass(frozen=True)
class ExchangeMismatch:
    """The server's answer to ranks that meet in different functions."""

    ordinal: int
    reason: str


ExchangeAnswer = ExchangeResult | ExchangeFailure | ExchangeMismatch


@dataclass(frozen=True)
class ShutdownMessage:
    """The server's last word to a rank: all work is done, end."""
