"""How each rank of a group ended, and which end was the cause."""

from __future__ import annotations

import pickle
import signal
from dataclasses import dataclass
from enum import Enum
from typing import Any

from zharness.errors import ZHarnessError


class End(Enum):
    """The ways in which a rank ends; the value reads on after "rank 1 "."""

    RETURNED = "returned"
    RAISED = "raised"
    SIGNALLED = "was ended by a signal"
    EXITED = "exited without a result"
    HUNG = "did not finish in time"
    STOPPED = "was stopped because another rank had failed"


# A death nobody reported comes before the errors that it causes in the peers' collectives: a peer notices the closed
# connection within a millisecond, often before the server wakes up, so clocks alone would blame the peer.
_PRECEDENCE = {End.SIGNALLED: 0, End.EXITED: 0, End.RAISED: 1, End.HUNG: 2, End.STOPPED: 3}


@dataclass(frozen=True)
class RankOutcome:
    """One rank's end.

    ``at_ns`` is CLOCK_MONOTONIC, comparable between processes of one machine. ``payload`` is the pickled return value.
    ``innermost`` is the file of the innermost frame of a raised exception. ``stack`` is where a hung or stopped rank
    stood. ``output`` is the end of what the rank printed.
    """

    rank: int
    end: End
    at_ns: int
    cause: str = ""
    exception: str = ""
    innermost: str = ""
    traceback: str = ""
    stack: str = ""
    output: str = ""
    payload: bytes = b""

    @property
    def value(self) -> Any:
        """What the rank's function returned. The bytes were written by a rank that this process started."""
        return pickle.loads(self.payload)  # noqa: S301 - see the docstring

    def words(self) -> str:
        """One sentence: which rank, how it ended, why."""
        return f"rank {self.rank} {self.end.value}" + (f": {self.cause}" if self.cause else "")


@dataclass(frozen=True)
class GroupOutcome:
    """The ends of all ranks of one group, in rank order."""

    ranks: tuple[RankOutcome, ...]
    seconds: float

    @property
    def failures(self) -> tuple[RankOutcome, ...]:
        """The ranks that did not return, the cause first."""
        failed = [outcome for outcome in self.ranks if outcome.end is not End.RETURNED]
        return tuple(sorted(failed, key=lambda outcome: (_PRECEDENCE[outcome.end], outcome.at_ns)))

    @property
    def cause(self) -> RankOutcome | None:
        """The first failure; None when every rank returned."""
        return self.failures[0] if self.failures else None

    def values(self) -> list[Any]:
        """Every rank's return value, in rank order. Raises RanksFailed when a rank did not return."""
        if self.failures:
            raise RanksFailed(self)
        return [outcome.value for outcome in self.ranks]

    def describe(self) -> str:
        """Every failed rank in words, the cause first, with tracebacks, stacks and output."""
        blocks = []
        for outcome in self.failures:
            details = [outcome.traceback, outcome.stack, outcome.output and f"output:\n{outcome.output}"]
            blocks.append("\n".join([outcome.words(), *(text.rstrip() for text in details if text)]))
        return "\n\n".join(blocks)


class RanksFailed(ZHarnessError):
    """At least one rank did not return; ``outcome`` has every rank's end."""

    def __init__(self, outcome: GroupOutcome) -> None:
        super().__init__(outcome.describe())
        self.outcome = outcome


def signal_name(number: int) -> str:
    """``SIGSEGV`` for 11; the bare number for a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
