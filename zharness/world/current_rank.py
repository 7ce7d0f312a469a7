"""Get the rank of this process, and exchange values between ranks without collectives."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from zharness.errors import WorldError


class RankChannel(Protocol):
    """A rank's connection to the other ranks through the rank server or a key-value store, without collectives."""

    def exchange(self, value: bytes, operation: str, call_site: str) -> tuple[bytes, ...]:
        """Send ``value`` to the other ranks, and return the values of all ranks in rank order.

        ``operation`` is the name of the function that the test called, and ``call_site`` is the file and line of the
        call. Raises WorldError if a peer ended before it sent its value, and ExchangeMismatchError if a peer called
        another function.
        """
        ...

    def announce(self, operation: str, call_site: str) -> None:
        """Report the collective that this rank enters next, and the call site, so that a mismatch can be detected."""
        ...


class CurrentRank:
    """The rank of this process, the world size, and the channel through which this rank reaches the other ranks.

    ``scratch_dir`` is a folder that is removed when this rank ends, also if this rank is killed.
    """

    def __init__(self, rank: int, world_size: int, channel: RankChannel, scratch_dir: Path) -> None:
        self.rank = rank
        self.world_size = world_size
        self.channel = channel
        self.scratch_dir = scratch_dir


_current_ranks: list[CurrentRank] = []  # at most one element, because a process is at most one rank


def set_current_rank(current: CurrentRank) -> None:
    """Register ``current`` as this process's rank."""
    _current_ranks[:] = [current]


def clear_current_rank() -> None:
    """Unregister this process's rank. After this call, ``is_rank`` returns False."""
    _current_ranks.clear()


def is_rank() -> bool:
    """Return whether this process is a rank."""
    return bool(_current_ranks)


def current_rank() -> CurrentRank:
    """Return the CurrentRank of this process. Raises WorldError in a process that is not a rank."""
    if not _current_ranks:
        raise WorldError("this process is not a rank; mark the test with @pytest.mark.world_size(N)")
    return _current_ranks[0]


class ExchangeMismatchError(WorldError):
    """Raised if one rank calls ``exchange`` while another rank calls ``assert_together``."""


def exchange(value: Any) -> list[Any]:
    """Return the ``value`` of every rank, in rank order. Every rank has to call this function.

    The values are pickled and sent without collectives, so the function works even while collectives are broken.
    Raises WorldError if a peer ended before it sent its value, and ExchangeMismatchError if a peer called
    ``assert_together`` instead.
    """
    return exchange_as("exchange", value)


def exchange_as(operation: str, value: Any) -> list[Any]:
    """Exchange ``value`` and return the values of all ranks; ``operation`` has to be the same on every rank."""
    answers = current_rank().channel.exchange(pickle.dumps(value), operation, format_call_site(sys._getframe(2)))
    return [pickle.loads(answer) for answer in answers]  # noqa: S301 - written by ranks of this very group


def format_call_site(frame: FrameType) -> str:
    """Return the file name and line of a frame, as in ``test_x.py, line 7``."""
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"


def assert_together(condition: object, message: str = "") -> None:
    """Raise AssertionError on every rank if ``condition`` is false on any rank.

    Because all ranks fail together, no rank enters a collective that a failed rank never reaches. The error lists the
    failed ranks, each with its ``message``. Every rank has to call this function. The function also raises the errors
    that ``exchange`` raises.
    """
    results = exchange_as("assert_together", (bool(condition), str(message)))
    failed = [(rank, reason) for rank, (is_true, reason) in enumerate(results) if not is_true]
    if failed:
        reasons = "; ".join(f"rank {rank}: {reason or 'the condition is false'}" for rank, reason in failed)
        raise AssertionError(f"{len(failed)} of {len(results)} ranks: {reasons}")
