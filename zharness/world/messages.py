"""What travels between a rank and its server while a piece of work runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Standing(Enum):
    """What a note says of its rank: it goes on, it has failed, or it takes no further part (a skip)."""

    FINE = "fine"
    FAILED = "failed"
    LEFT = "left"


@dataclass(frozen=True)
class Note:
    """Something a rank tells before its end: the report of one phase of a test, say.

    ``at_ns`` is CLOCK_MONOTONIC at the moment of what is told, not at that of the telling. ``payload`` is pickled.
    """

    rank: int
    at_ns: int
    standing: Standing
    payload: bytes


@dataclass(frozen=True)
class Vote:
    """A rank's contribution to an exchange; it waits until every rank's is in.

    ``ordinal`` counts this rank's exchanges, ``what`` is the function that it called, ``site`` where.
    """

    rank: int
    ordinal: int
    what: str
    site: str
    value: bytes


@dataclass(frozen=True)
class Announced:
    """A collective that a rank is about to enter: its number on this rank, when, what it is, and where it is called."""

    rank: int
    ordinal: int
    at_ns: int
    what: str
    site: str


@dataclass(frozen=True)
class Hold:
    """The deadline is off while a person looks at the rank (``reason``); the empty reason switches it on again."""

    rank: int
    reason: str


@dataclass(frozen=True)
class Votes:
    """The server's answer to a complete exchange: every rank's value, in rank order.

    ``ordinal`` is the asking rank's own: a rank that left an exchange by an exception finds its answer still there.
    """

    ordinal: int
    values: tuple[bytes, ...]


@dataclass(frozen=True)
class NoVotes:
    """The server's answer to an exchange that cannot be completed, with the reason."""

    ordinal: int
    reason: str


@dataclass(frozen=True)
class Apart:
    """The server's answer to ranks that meet in different functions."""

    ordinal: int
    reason: str


Answer = Votes | NoVotes | Apart


@dataclass(frozen=True)
class Leave:
    """The server's last word to a rank: all work is done, end."""
