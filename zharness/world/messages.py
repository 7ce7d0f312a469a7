"""The messages between a rank and its server while a task runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class RankStatus(Enum):
    """The state of a rank after a note: it continues, has failed, or has skipped the rest of the task."""

    OK = "fine"
    FAILED = "failed"
    SKIPPED = "left"


@dataclass(frozen=True)
class RankNote:
    """A report that a rank sends before its task has ended, such as that of one phase of a test.

    ``at_ns`` is CLOCK_MONOTONIC when the reported event happened, not when it was sent. ``payload`` is pickled.
    """

    rank: int
    at_ns: int
    status: RankStatus
    payload: bytes


@dataclass(frozen=True)
class ExchangeRequest:
    """A rank's value for an exchange; the rank waits until every rank has sent one.

    ``ordinal`` counts this rank's exchanges, ``operation`` names the function that it called, ``call_site`` is the file
    and line of the call.
    """

    rank: int
    ordinal: int
    operation: str
    call_site: str
    value: bytes


@dataclass(frozen=True)
class CollectiveAnnouncement:
    """A collective that a rank is about to enter.

    ``ordinal`` counts this rank's collectives, ``at_ns`` is CLOCK_MONOTONIC, ``operation`` is the collective's name,
    dtype and shape.
    """

    rank: int
    ordinal: int
    at_ns: int
    operation: str
    call_site: str


@dataclass(frozen=True)
class DeadlineHold:
    """Suspends the deadline while a debugger holds the rank; an empty ``reason`` resumes it."""

    rank: int
    reason: str


@dataclass(frozen=True)
class ExchangeResult:
    """The server's answer to a complete exchange: every rank's value, in rank order.

    ``ordinal`` is that of the rank's request: a rank skips the answer to an exchange that an exception interrupted.
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
    """The server's answer when ranks called different exchange functions; ``reason`` names the calls."""

    ordinal: int
    reason: str


ExchangeAnswer = ExchangeResult | ExchangeFailure | ExchangeMismatch


@dataclass(frozen=True)
class ShutdownMessage:
    """The last message to a rank or a witness: it has no more tasks and has to end."""
