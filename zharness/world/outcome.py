"""How each rank of a group ended, and which rank's end caused the others."""

from __future__ import annotations

import pickle
import signal
from dataclasses import dataclass
from enum import Enum
from typing import Any

from zharness.errors import ZHarnessError
from zharness.world.messages import RankNote, RankStatus


class RankEnd(Enum):
    """The ways in which a rank ends; the value continues a sentence that begins with "rank 1 "."""

    RETURNED = "returned"
    RAISED = "raised"
    SIGNALLED = "was ended by a signal"
    EXITED = "exited without a result"
    HUNG = "did not finish in time"
    STOPPED = "was stopped because another rank had failed"


# The death of a rank takes precedence over the errors that it causes in its peers' collectives: a peer notices the
# closed connection within a millisecond, often before the server wakes up, so times alone would blame the peer.
_CAUSE_PRECEDENCE = {RankEnd.SIGNALLED: 0, RankEnd.EXITED: 0, RankEnd.RAISED: 1, RankEnd.HUNG: 2, RankEnd.STOPPED: 3}


MISMATCH_EXCEPTION = "zharness.world.CollectiveMismatch"  # ``exception`` of ranks that entered different collectives
OUTPUT_TAIL_CHARS = 4000  # characters of a rank's output in a description


@dataclass(frozen=True)
class CapturedOutput:
    """The text that a rank wrote to ``stream`` ("stdout" or "stderr") during ``phase``, without the middle if long."""

    phase: str
    stream: str
    text: str


@dataclass(frozen=True)
class RankOutcome:
    """How one rank ended its task.

    ``at_ns`` is CLOCK_MONOTONIC, comparable between processes of one machine. ``cause`` explains ``end`` in a sentence.
    ``exception`` is the qualified class name of a raised exception, ``innermost_file`` the file of its innermost frame.
    ``stack`` is the stack of a hung or stopped rank, ``site`` the collective in which it waited, if any. ``phase`` is
    the test phase in which it ended. ``payload`` is the pickled return value. ``notes`` are the reports that it sent
    before. ``leftovers`` describes the threads and processes that it did not end. ``imported_modules`` are the modules
    of torch that the task was the first to import.
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
        """Return the last ``OUTPUT_TAIL_CHARS`` characters that the rank printed, stream by stream."""
        return "".join(part.text for part in self.captured_output)[-OUTPUT_TAIL_CHARS:].strip()

    @property
    def is_successful(self) -> bool:
        """Return whether the rank returned and reported no failure before."""
        return self.end is RankEnd.RETURNED and all(note.status is not RankStatus.FAILED for note in self.notes)

    @property
    def value(self) -> Any:
        """Unpickle and return the return value of the rank's function. A rank of this session wrote the bytes."""
        return pickle.loads(self.payload)  # noqa: S301 - see the docstring

    @property
    def precedence(self) -> int:
        """Return a sort key: an end with a lower number is the cause of ends with higher ones, even if it came later.

        A collective mismatch comes first, because it may make a peer abort.
        """
        return 0 if self.exception == MISMATCH_EXCEPTION else _CAUSE_PRECEDENCE[self.end]

    def describe(self) -> str:
        """Return one sentence: the rank, how it ended, and the cause."""
        return f"rank {self.rank} {self.end.value}" + (f": {self.cause}" if self.cause else "")


@dataclass(frozen=True)
class GroupOutcome:
    """The ends of all ranks of one group, in rank order."""

    ranks: tuple[RankOutcome, ...]
    seconds: float
    previous_outcome: GroupOutcome | None = None  # of the pool's former ranks, if one died between tasks

    @property
    def failures(self) -> tuple[RankOutcome, ...]:
        """Return the ranks that did not return, the cause first.

        Among hung ranks, one that waits in no collective comes first, because the others wait for it.
        """
        failed = [outcome for outcome in self.ranks if outcome.end is not RankEnd.RETURNED]
        return tuple(sorted(failed, key=lambda outcome: (outcome.precedence, bool(outcome.site), outcome.at_ns)))

    @property
    def cause(self) -> RankOutcome | None:
        """Return the rank whose end caused the others; None if every rank returned."""
        return self.failures[0] if self.failures else None

    def values(self) -> list[Any]:
        """Return every rank's return value, in rank order. Raises RanksFailed if a rank did not return."""
        if self.failures:
            raise RanksFailed(self)
        return [outcome.value for outcome in self.ranks]

    def describe(self) -> str:
        """Describe every failed rank, the cause first, with tracebacks, stacks and output."""
        blocks: dict[str, list[RankOutcome]] = {}
        for outcome in self.failures:
            details = [outcome.traceback, outcome.stack, outcome.output and f"output:\n{outcome.output}"]
            blocks.setdefault("\n".join(text.rstrip() for text in details if text), []).append(outcome)
        return "\n\n".join(
            "\n".join([*(outcome.describe() for outcome in outcomes), details]) for details, outcomes in blocks.items()
        )


class RanksFailed(ZHarnessError):
    """At least one rank did not return; ``outcome`` has every rank's end."""

    def __init__(self, outcome: GroupOutcome) -> None:
        super().__init__(outcome.describe())
        self.outcome = outcome


def signal_name(signal_number: int) -> str:
    """Return the name of a signal: ``SIGSEGV`` for 11, ``signal 99`` for a number without a name."""
    try:
        return signal.Signals(signal_number).name
    except ValueError:
        return f"signal {signal_number}"
