"""Define the messages that a rank and its rank server exchange while a task runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class RankStatus(Enum):
    """The state that a rank reports in a note: the rank continues, has failed, or has skipped the rest of the task.

    A rank has one of the last three states if it waits in an exchange because it has ended a part of the task, such as
    a Hypothesis example, earlier than other ranks: by a failure, by another exception such as a skip, or by returning.
    """

    OK = "fine"
    FAILED = "failed"
    SKIPPED = "skipped"
    PART_FAILED = "failed a part"
    PART_LEFT = "left a part"
    PART_ENDED = "ended a part"


@dataclass(frozen=True)
class RankNote:
    """A report that a rank sends before its task has ended, such as the report of one phase of a test.

    ``at_ns`` is the time at which the reported event happened, in nanoseconds of CLOCK_MONOTONIC. ``payload`` is the
    pickled content of the report.
    """

    rank: int
    at_ns: int
    status: RankStatus
    payload: bytes


@dataclass(frozen=True)
class ExchangeRequest:
    """A rank's request to exchange a value with the other ranks; the rank waits until every rank has sent its request.

    ``ordinal`` is the number of the exchange on this rank, counted from 1. ``operation`` is the name of the function
    that the rank called, ``call_site`` the file and line of that call, and ``value`` the pickled value.
    """

    rank: int
    ordinal: int
    operation: str
    call_site: str
    value: bytes


@dataclass(frozen=True)
class CollectiveAnnouncement:
    """A rank's announcement of the collective that the rank is about to enter.

    ``ordinal`` is the number of the collective on this rank, counted from 1. ``at_ns`` is the time of the announcement
    in nanoseconds of CLOCK_MONOTONIC. ``operation`` contains the collective's name, dtype and shape, and ``call_site``
    is the file and line of the call.
    """

    rank: int
    ordinal: int
    at_ns: int
    operation: str
    call_site: str


@dataclass(frozen=True)
class DeadlineHold:
    """A request to suspend the deadline because ``rank`` is in a debugger, or to resume it if ``reason`` is empty."""

    rank: int
    reason: str


@dataclass(frozen=True)
class ExchangeResult:
    """The server's answer to an exchange for which every rank sent a value: all values, in rank order.

    ``ordinal`` is the number in the rank's request. By this number, a rank recognizes and ignores an answer to an
    earlier exchange that an exception interrupted.
    """

    ordinal: int
    values: tuple[bytes, ...]


@dataclass(frozen=True)
class ExchangeFailure:
    """The server's answer to an exchange that cannot be completed; ``reason`` says why."""

    ordinal: int
    reason: str


@dataclass(frozen=True)
class ExchangeMismatch:
    """The server's answer to an exchange for which the ranks called different functions; ``reason`` names the calls."""

    ordinal: int
    reason: str


ExchangeAnswer = ExchangeResult | ExchangeFailure | ExchangeMismatch


@dataclass(frozen=True)
class ShutdownMessage:
    """The last message to a rank, or to the witness process that watches a rank: the receiver has to end."""
