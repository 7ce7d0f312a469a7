"""This process as a rank: who it is, and what it can do together with its peers beside the collectives."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from zharness.errors import WorldError


class Channel(Protocol):
    """How a rank speaks with its peers when collectives may not be trusted: through the server, or through a store."""

    def exchange(self, value: bytes, what: str, site: str) -> tuple[bytes, ...]:
        """Every rank's value, in rank order. ``what`` is the function that is called, ``site`` where.

        Raises WorldError when a peer has ended without giving one, NotTogether when it is in another function.
        """
        ...

    def announce(self, what: str, site: str) -> None:
        """Say which collective comes next and where it is called, so that a mismatch can be named."""
        ...


class Here:
    """One rank, as it sees itself."""

    def __init__(self, rank: int, world_size: int, channel: Channel) -> None:
        self.rank = rank
        self.world_size = world_size
        self.channel = channel


_ranks: list[Here] = []  # at most one: a process is one rank


def become(here: Here) -> None:
    """Make this process that rank. Called once, by whoever started the rank."""
    _ranks[:] = [here]


def resign() -> None:
    """Be no rank any more: in a process that lives on and does other things as well."""
    _ranks.clear()


def is_rank() -> bool:
    """Whether this process is a rank."""
    return bool(_ranks)


def here() -> Here:
    """This rank. Raises WorldError in a process that is none."""
    if not _ranks:
        raise WorldError("this process is not a rank; mark the test with @pytest.mark.world_size(N)")
    return _ranks[0]


class NotTogether(WorldError):
    """The ranks meet, but in different functions."""


def exchange(value: Any) -> list[Any]:
    """Every rank's ``value``, in rank order; every rank has to call it.

    It goes through the control channel, so it works while collectives are broken. Values are pickled. Raises WorldError
    when a peer has ended without giving one, NotTogether when it is in ``assert_together`` meanwhile.
    """
    return exchange_as("exchange", value)


def exchange_as(what: str, value: Any) -> list[Any]:
    """``exchange`` with those ranks that exchange under the same name."""
    answers = here().channel.exchange(pickle.dumps(value), what, site_of(sys._getframe(2)))
    return [pickle.loads(answer) for answer in answers]  # noqa: S301 - written by ranks of this very group


def site_of(frame: FrameType) -> str:
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
