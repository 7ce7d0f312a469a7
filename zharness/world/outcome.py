"""How each rank of a group ended, and which end was the cause."""

from __future__ import annotations

import pickle
import signal
from dataclasses import dataclass
from enum import Enum
from typing import Any

from zharness.errors import ZHarnessError
from zharness.world.messages import RankNote, RankStatus


class RankEnd(Enum):
    """The ways in which a rank ends; the value reads on after "rank 1 "."""

    RETURNED = "returned"
    RAISED = "raised"
    SIGNALLED = "was ended by a signal"
    EXITED = "exited without a result"
    HUNG = "did not finish in time"
    STOPPED = "was stopped because another rank had failed"


# A death nobody reported comes before the errors that it causes in the peers' collectives: a peer notices the closed
# connection within a millisecond, often before the server wakes up, so clocks alone would blame the peer.
_CAUSE_PRECEDENCE = {RankEnd.SIGNALLED: 0, RankEnd.EXITED: 0, RankEnd.RAISED: 1, RankEnd.HUNG: 2, RankEnd.STOPPED: 3}


MISMATCH_EXCEPTION = "zharness.world.CollectiveMismatch"  # the ``exception`` of ranks that the server found to disagree
OUTPUT_TAIL_CHARS = 4000  # characters of a rank's output in a description


@dataclass(frozen=True)
class CapturedOutput:
    """What a rank wrote to ``stream`` ("stdout" or "stderr") while it was in the phase ``label``; cut in the middle."""

    phase: str
    stream: str
    text: str


@dataclass(frozen=True)
class RankOutcome:
    """One rank's end.

    ``at_ns`` is CLOCK_MONOTONIC, comparable between processes of one machine. ``payload`` is the pickled return value.
    ``innermost`` is the file of the innermost frame of a raised exception. ``stack`` is where a hung or stopped rank
    stood, and ``site`` the collective in which it waited then, if it did. ``phase`` is the last label under which it
    printed. ``notes`` are what it told before its end, ``left_behind`` the threads and processes that it did not end,
    ``imported`` the modules of torch that it was the first to need.
    """

    rank: int
    end: RankEnd
    at_ns: int
    cause: str = ""
    exception: str = ""
    innermost_file: str = ""
    traceback: str = ""
    stack: str = ""
    site: str = ""
    phase: str = ""
    payload: bytes = b""
    notes: tuple[RankNote, ...] = ()
    captured_output: tuple[CapturedOutput, ...] = ()
    leftovers: tuple[str, ...] = ()
    imported_modules: tuple[str, ...] = ()

    @property
    def output(self) -> str:
        """The end of what the rank printed, stream by stream."""
        return "".join(part.text for part in self.captured_output)[-OUTPUT_TAIL_CHARS:].strip()

    @property
    def is_successful(self) -> bool:
        """Whether the rank returned, and told of no failure before."""
        return self.end is RankEnd.RETURNED and all(note.status is not RankStatus.FAILED for note in self.notes)

    @property
    def value(self) -> Any:
        """What the rank's function returned. The bytes were written by a rank that this process started."""
        return pickle.loads(self.payload)  # noqa: S301 - see the docstring

    @property
    def precedence(self) -> int:
        """Which ends are causes of which, whatever the clocks say; a mismatch may make a peer abort."""
        return 0 if self.exception == MISMATCH_EXCEPTION else _CAUSE_PRECEDENCE[self.end]

    def describe(self) -> str:
        """One sentence: which rank, how it ended, why."""
        return f"rank {self.rank} {self.end.value}" + (f": {self.cause}" if self.cause else "")


@dataclass(frozen=True)
class GroupOutcome:
    """The ends of all ranks of one group, in rank order."""

    ranks: tuple[RankOutcome, ...]
    seconds: float
    previous_outcome: GroupOutcome | None = (
        None  # of ranks that lived on, and of which one ended before this work began
    )

    @property
    def failures(self) -> tuple[RankOutcome, ...]:
        """The ranks that did not return, the cause first; of hung ranks, those for which the others wait."""
        failed = [outcome for outcome in self.ranks if outcome.end is not RankEnd.RETURNED]
        return tuple(sorted(failed, key=lambda one: (one.precedence, bool(one.site), one.at_ns)))

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
        blocks: dict[str, list[RankOutcome]] = {}
        for outcome in self.failures:
            details = [outcome.traceback, outcome.stack, outcome.output and f"output:\n{outcome.output}"]
            blocks.setdefault("\n".join(text.rstrip() for text in details if text), []).append(outcome)
        return "\n\n".join("\n".join([*(one.describe() for one in alike), text]) for text, alike in blocks.items())


class RanksFailed(ZHarnessError):
    """At least one rank did not return; ``outcome`` has every rank's end."""

    def __init__(self, outcome: GroupOutcome) -> None:
        super().__init__(outcome.describe())
        self.outcome = outcome


def signal_name(signal_number: int) -> str:
    """``SIGSEGV`` for 11; the bare number for a signal without a name."""
    try:
        return signal.Signals(signal_number).name
    except ValueError:
        return f"signal {signal_number}"
