"""Write the records of a run while its cells end, and show how many have ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

from tqdm import tqdm

from zharness.run.outcomes import outcome_name
from zharness.run.record import Record, RecordFile

PROGRESS_INTERVAL = 15.0  # seconds between two lines of a run whose standard error is not a terminal


def write_with_progress(records: Iterable[Record], record_file: RecordFile | None, cell_count: int) -> Iterator[Record]:
    """Yield ``records``, after writing each record to ``record_file`` and counting it in the progress report."""
    unexpected = 0
    log = ProgressLog(cell_count)
    with progress_bar(cell_count) as bar:
        for record in records:
            if record_file is not None:
                record_file.add(record)
            unexpected += not record.is_expected
            bar.set_postfix_str(f"{unexpected} unexpected" if unexpected else outcome_name(record), refresh=False)
            bar.update()
            if bar.disable:
                log.count(unexpected)
            yield record


def progress_bar(total: int) -> tqdm[NoReturn]:
    """Create a progress bar on standard error that disappears when full.

    The bar is disabled if standard error is not a terminal.
    """
    return tqdm(total=total, unit="cell", leave=False, disable=not sys.stderr.isatty())


class ProgressLog:
    """Writes a line of progress to standard error every 15 seconds, for runs whose output goes to a file.

    ``clock()`` returns the time in seconds.
    """

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._clock = clock
        self._began = self._last_line = clock()
        self._finished = 0

    def count(self, unexpected: int) -> None:
        """Count one more finished cell. ``unexpected`` is the number of unexpected outcomes so far."""
        self._finished += 1
        now = self._clock()
        if now - self._last_line >= PROGRESS_INTERVAL:
            self._last_line = now
            seconds = f"{now - self._began:.0f} s"
            sys.stderr.write(f"{self._finished} of {self._total} cells in {seconds}, {unexpected} unexpected\n")
            sys.stderr.flush()
