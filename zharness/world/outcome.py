"""Describe how each rank of a group ended, and determine which rank's failure caused those of the other ranks."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from zharness.device.gpu_memory import GpuMemory
from zharness.errors import ZHarnessError
from zharness.world.messages import RankNote, RankStatus


class RankEnd(Enum):
    """The ways in which a rank can end. The value of each member completes a sentence that begins with "rank 1"."""

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
    """The text that a rank wrote to ``stream`` ("stdout" or "stderr") during the test phase ``phase``.

    If the text was too long, its middle is missing.
    """

    phase: str
    stream: str
    text: str


@dataclass(frozen=True)
class RankOutcome:
    """The outcome of a task on one rank: how the rank ended the task, and why.

    ``at_ns`` is the time of the end in nanoseconds of CLOCK_MONOTONIC, which processes of one machine can compare.
    ``cause`` is a sentence that explains ``end``. ``exception`` is the qualified class name of the exception that the
    task raised, and ``innermost_file`` is the file of the exception's innermost frame; ``raising_frame`` names file,
    line and function of its innermost frame in the user's or the engine's code. ``stack`` is the stack of a rank that
    hung or was stopped, and ``site`` is the collective in which that rank waited, or empty. ``phase`` is the test phase
    in which the rank ended. ``payload`` is the pickled return value. ``notes`` are the reports that the rank sent
    before its end. ``leftovers`` describes the threads and processes that the rank started and did not end.
    ``imported_modules`` are the modules of torch that the rank imported during this task. ``cpu_seconds`` is the CPU
    time that the task took on the rank, if it returned, and ``gpu_memory`` the peaks of its GPU memory, if it used one.
    If the task raised, ``collective_counts`` maps the name and the ranks of each process group to the number of
    collectives that the rank started on it; they are counted only for POOLED_AFTER_ERRORS.
    """

    rank: int
    end: RankEnd
    at_ns: int
    cause: str = ""
    exception: str = ""
    innermost_file: str = ""
    raising_frame: str = ""
    traceback: str = ""
    stack: str = ""
    site: str = ""
    phase: str = ""
    payload: bytes = b""
    notes: tuple[RankNote, ...] = ()
    captured_output: tuple[CapturedOutput, ...] = ()
    leftovers: tuple[str, ...] = ()
    imported_modules: tuple[str, ...] = ()
    cpu_seconds: float = 0.0
    gpu_memory: GpuMemory | None = None
    collective_counts: Mapping[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)

    @property
    def output(self) -> str:
        """Return the last ``OUTPUT_TAIL_CHARS`` characters of the rank's output; the streams are concatenated."""
        return "".join(part.text for part in self.captured_output)[-OUTPUT_TAIL_CHARS:].strip()

    @property
    def is_successful(self) -> bool:
        """Return whether the rank's function returned and none of the rank's notes reported a failure."""
        return self.end is RankEnd.RETURNED and all(note.status is not RankStatus.FAILED for note in self.notes)

    @property
    def value(self) -> Any:
        """Unpickle the return value of the rank's function. The bytes are safe: a rank of this session wrote them."""
        return pickle.loads(self.payload)  # noqa: S301 - see the docstring

    @property
    def precedence(self) -> int:
        """Return a sort key for finding the cause of a failure: the outcome with the lowest number is the cause.

        This holds even if that outcome is not the earliest. A mismatch of collectives has the lowest number, because a
        mismatch can make another rank abort.
        """
        return 0 if self.exception == MISMATCH_EXCEPTION else _CAUSE_PRECEDENCE[self.end]

    def describe(self) -> str:
        """Return a sentence that names the rank, says how it ended and, if known, why."""
        return f"rank {self.rank} {self.end.value}" + (f": {self.cause}" if self.cause else "")


@dataclass(frozen=True)
class GroupOutcome:
    """The outcomes of all ranks that ran one task, in rank order.

    ``seconds`` is the duration of the task.
    """

    ranks: tuple[RankOutcome, ...]
    seconds: float
    previous_outcome: GroupOutcome | None = None  # of the pool's former ranks, if one died between tasks

    @property
    def failures(self) -> tuple[RankOutcome, ...]:
        """Return the outcomes of the ranks whose function did not return, sorted so that the cause comes first.

        If several ranks hang, a rank outside of a collective comes first, because the other ranks are waiting for it.
        """
        failed = [outcome for outcome in self.ranks if outcome.end is not RankEnd.RETURNED]
        return tuple(sorted(failed, key=lambda outcome: (outcome.precedence, bool(outcome.site), outcome.at_ns)))

    @property
    def cause(self) -> RankOutcome | None:
        """Return the outcome of the rank that made the other ranks fail; None if every rank's function returned."""
        return self.failures[0] if self.failures else None

    def values(self) -> list[Any]:
        """Return the return values of all ranks, in rank order. Raises RanksFailed if a function did not return."""
        if self.failures:
            raise RanksFailed(self)
        return [outcome.value for outcome in self.ranks]

    def describe(self) -> str:
        """Describe every failed rank, with traceback, stack and output; the rank that caused the failure is first."""
        blocks: dict[str, list[RankOutcome]] = {}
        for outcome in self.failures:
            details = [outcome.traceback, outcome.stack, outcome.output and f"output:\n{outcome.output}"]
            blocks.setdefault("\n".join(text.rstrip() for text in details if text), []).append(outcome)
        return "\n\n".join(
            "\n".join([*(outcome.describe() for outcome in outcomes), details]) for details, outcomes in blocks.items()
        )


class RanksFailed(ZHarnessError):
    """Raised when the function did not return on at least one rank; ``outcome`` contains the outcomes of all ranks."""

    def __init__(self, outcome: GroupOutcome) -> None:
        super().__init__(outcome.describe())
        self.outcome = outcome


def signal_name(signal_number: int) -> str:
    """Return the name of a signal, such as ``SIGSEGV`` for 11, or ``signal 99`` for signal 99, which has no name."""
    try:
        return signal.Signals(signal_number).name
    except ValueError:
        return f"signal {signal_number}"
