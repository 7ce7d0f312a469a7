"""Send and read the notes of ranks that have left a Hypothesis example by an exception, and wait for the others."""

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

NOTE_SECONDS = 0.1  # time for peers to send their verdicts before this rank sends a note of its exception


def send_note(note: ExampleNote) -> None:
    """Send a note on an example to the pytest process."""
    channel: Any = current_rank().channel  # every channel of a rank that runs tests sends notes
    left = RankStatus.PART_FAILED if note.verdict.status is ExampleStatus.FAILED else RankStatus.PART_LEFT
    channel.note(left if note.error else RankStatus.OK, note, time.monotonic_ns())


@contextmanager
def note_while_waiting(note: ExampleNote) -> Iterator[None]:
    """Send ``note`` if it has an error and the block, which waits for the peers, takes long.

    If the block ends nevertheless, a note without an error replaces the note.
    """
    if not note.error or not is_rank():
        yield
        return
    is_sent = threading.Event()

    def send() -> None:
        """Send the note, in the thread of the timer."""
        send_note(note)
        is_sent.set()

    timer = threading.Timer(NOTE_SECONDS, send)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
    if is_sent.is_set():
        send_note(replace(note, error="", ended_examples=()))


def load_example_notes(outcome: RankOutcome) -> list[ExampleNote]:
    """Return the notes on Hypothesis examples that a rank sent, in order of time."""
    payloads = (pickle.loads(note.payload) for note in outcome.notes)  # noqa: S301 - written by our own ranks
    return [payload for payload in payloads if isinstance(payload, ExampleNote)]
