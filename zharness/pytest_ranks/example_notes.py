"""Send and read the notes of ranks that have ended a Hypothesis example and wait for the other ranks."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from zharness.pytest_ranks.example_verdict import ExampleStatus
from zharness.pytest_ranks.phase_report import ExampleNote
from zharness.world.current_rank import current_rank, is_rank
from zharness.world.messages import RankStatus
from zharness.world.outcome import RankOutcome

# The time for peers to send their verdicts before this rank sends a note of its exception or of its return. After a
# note, the server reads the ranks' stacks four times a second, which an example that is slow on one rank does not need.
EXCEPTION_NOTE_SECONDS, RETURN_NOTE_SECONDS = 0.1, 1.0


def send_note(note: ExampleNote) -> None:
    """Send a note on an example to the pytest process."""
    channel: Any = current_rank().channel  # every channel of a rank that runs tests sends notes
    channel.note(note.status, note, time.monotonic_ns())


def choose_departure(status: ExampleStatus) -> RankStatus:
    """Return the status of a rank that waits for other ranks after an example that ended with ``status``."""
    departures = {ExampleStatus.FAILED: RankStatus.PART_FAILED, ExampleStatus.PASSED: RankStatus.PART_ENDED}
    return departures.get(status, RankStatus.PART_LEFT)


@contextmanager
def note_while_waiting(note: ExampleNote) -> Iterator[None]:
    """Send ``note`` if the block, which waits for the peers, takes long.

    If the block ends after the note was sent, send another note with the status OK, which replaces the first one.
    """
    if not is_rank():
        yield
        return
    is_sent = threading.Event()

    def send() -> None:
        """Send the note, in the thread of the timer."""
        send_note(note)
        is_sent.set()

    timer = threading.Timer(EXCEPTION_NOTE_SECONDS if note.error else RETURN_NOTE_SECONDS, send)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
    if is_sent.is_set():
        send_note(replace(note, status=RankStatus.OK, ended_examples=()))


def load_example_notes(outcome: RankOutcome) -> list[ExampleNote]:
    """Return the notes on Hypothesis examples that a rank sent, in order of time."""
    payloads = (pickle.loads(note.payload) for note in outcome.notes)  # noqa: S301 - written by our own ranks
    return [payload for payload in payloads if isinstance(payload, ExampleNote)]
