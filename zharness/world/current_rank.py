"""This process as a rank: who it is, and what it can do together with its peers beside the collectives."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from zharness.errors import WorldError


class RankChannel(Protocol):
    """How a rank speaks with its peers when collectives may not be trusted: through the server, or through a store."""

    def exchange(self, value: bytes, operation: str, call_site: str) -> tuple[bytes, ...]:
        """Every rank's value, in rank order. ``what`` is the function that is called, ``site`` where.

        Raises WorldError when a peer has ended without giving one, NotTogether when it is in another function.
        """
        ...

    def announce(self, operation: str, call_site: str) -> None:
        """Say which collective comes next and where it is called, so that a mismatch can be named."""
        ...


class CurrentRank:
    """One rank, as it sees itself."""

    def __init__(self, rank: int, world_size: int, channel: RankChannel) -> None:
        self.rank = rank
        self.world_size = world_size
        self.channel = channel


_current_ranks: list[CurrentRank] = []  # at most one: a process is one rank


def set_current_rank(current: CurrentRank) -> None:
    """Make this process that rank. Called once, by whoever started the rank."""
    _current_ranks[:] = [current]


def clear_current_rank() -> None:
    """Be no rank any more: in a process that lives on and does other things as well."""
    _current_ranks.clear()


def is_rank() -> bool:
    """Whether this process is a rank."""
    return bool(_current_ranks)


def current_rank() -> CurrentRank:
    """This rank. Raises WorldError in a process that is none."""
    if not _current_ranks:
        raise WorldError("this process is not a rank; mark the test with @pytest.mark.world_size(N)")
    return _current_ranks[0]


class ExchangeMismatchError(WorldError):
    """The ranks meet, but in different functions."""


def exchange(value: Any) -> list[Any]:
    """Every rank's ``value``, in rank order; every rank has to call it.

    It goes through the control channel, so it works while collectives are broken. Values are pickled. Raises WorldError
    when a peer has ended without giving one, NotTogether when it is in ``assert_together`` meanwhile.
    """
    return exchange_as("exchange", value)


def exchange_as(operation: str, value: Any) -> list[Any]:
    """``exchange`` with those ranks that exchange under the same name."""
    answers = current_rank().channel.exchange(pickle.dumps(value), operation, format_call_site(sys._getframe(2)))
    return [pickle.loads(answer) for answer in answers]  # noqa: S301 - written by ranks of this very group


def format_call_site(frame: FrameType) -> str:
    """Where a frame stands: ``test_x.py, line 7``."""
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"


def assert_together(condition: object, message: str = "") -> None:
    """An assertion that all ranks make together, and that fails on all of them when it fails on one.

    So no rank goes on into a collective that a peer will never reach. Raises AssertionError that names the ranks on
    which ``condition`` is false, each with its ``message``; otherwise as ``exchange``.
    """
    verdicts = exchange_as("assert_together", (bool(condition), str(message)))
    wrong = [(rank, words) for rank, (holds, words) in enumerate(verdicts) if not holds]
    if wrong:
        told = "; ".join(f"rank {rank}: {words or 'the condition is false'}" for rank, words in wrong)
        raise AssertionError(f"{len(wrong)} of {len(verdicts)} ranks: {told}")
