"""A run from request to exit code: cells on several lanes, progress while they run, the matrix when they are done."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn

import click
from tqdm import tqdm

from zharness.case import Case, looks_like_id
from zharness.report.matrix import exit_code, matrix, outcome
from zharness.report.outputs import Outputs
from zharness.report.sensitivity import sensitivity
from zharness.report.words import failures, summary
from zharness.run import Planned, Record, Request, Runner, plan
from zharness.run.excuses import Excuse
from zharness.run.plan import shuffled, validate
from zharness.run.record import RecordFile, record_file
from zharness.run.runner import Withheld, keep_apart, surroundings
from zharness.run.unmatched import unmatched
from zharness.world import Isolation
from zharness.world.launched import launched
from zharness.world.server import Surroundings


@dataclass(frozen=True)
class Options:
    """How cells are run: seconds for one group of ranks, the salt of every seed, cells at a time, whose ranks.

    ``own`` are the user's excuses; ``withheld`` says whether features that an engine refuses are tried. ``shuffle`` is
    the seed of the order in which cells run; None: that of the matrix.
    """

    timeout: float = 60.0
    seed: int = 0
    lanes: int = 0
    isolation: Isolation = Isolation.FRESH
    own: tuple[Excuse, ...] = ()
    withheld: Withheld = Withheld.LEFT
    shuffle: int | None = None

    def runner(self, places: Mapping[str, Surroundings]) -> Runner:
        """One lane's runner."""
        return Runner(places, self.timeout, self.seed, self.isolation, self.own, self.withheld)

    def ordered(self, cells: Sequence[Planned]) -> Sequence[Planned]:
        """The cells in the order in which they run."""
        return cells if self.shuffle is None else shuffled(cells, self.shuffle)

    def width(self) -> int:
        """Cells at a time: as asked, else one for each core, since half of a cell is start and judgement."""
        return self.lanes or max(1, os.cpu_count() or 1)


def check(
    request: Request,
    options: Options,
    outputs: Outputs,
    place: Callable[[str], Surroundings] = surroundings,
) -> int:
    """Run every cell of ``request`` and report; the exit code of the command. Raises UsageError.

    ``place(engine)`` is what the rank server of an engine needs.
    """
    launch = launched()
    if launch is not None:
        from zharness.report import attached

        return attached.check(launch, request, options, outputs, place)
    outputs.check_writable()
    began = time.monotonic()
    with ExitStack() as stack:
        sink = partial(opened, stack, outputs.jsonl)
        records, complaints = run_request(request, options, sink, place)
    return conclude(records, time.monotonic() - began, outputs, complaints)


def opened(stack: ExitStack, path: Path | None) -> RecordFile | None:
    """The file of records, where one was asked for, until ``stack`` is left."""
    return stack.enter_context(record_file(path)) if path else None


def run_request(
    request: Request,
    options: Options,
    sink: Callable[[], RecordFile | None],
    place: Callable[[str], Surroundings],
) -> tuple[list[Record], list[str]]:
    """The records of every cell of ``request`` in the order of the matrix, and in words the excuses that match nothing.

    Each goes to the file of ``sink`` as it comes, which is asked for once there is something to run: a mistake in the
    request must not replace an earlier file. Raises UsageError.
    """
    validate(request)
    places = {name: place(name) for name in engines_of(request)}
    with ExitStack() as stack:
        runners = [stack.enter_context(options.runner(places)) for _ in range(options.width())]
        cells = plan(request, runners[0].claims)
        complaints = unmatched(cells, runners[0].claims, options.own)
        keep_apart(runners, cells)
        found = list(recorded(run_all(options.ordered(cells), runners), sink(), len(cells)))
    return as_planned(found, cells), complaints


def as_planned(records: Iterable[Record], cells: Sequence[Planned]) -> list[Record]:
    """The records in the order of the matrix."""
    order = {cell.case: position for position, cell in enumerate(cells)}
    return sorted(records, key=lambda record: order[record.case])


def engines_of(request: Request) -> list[str]:
    """The engines that the patterns or the axes of ``request`` name."""
    named = [Case.parse(text).engine for text in request.patterns if looks_like_id(text)]
    rest = [] if named and len(named) == len(request.patterns) else list(request.engines)
    return list(dict.fromkeys([*named, *rest]))


def run_all(cells: Sequence[Planned], runners: Sequence[Runner]) -> Iterator[Record]:
    """Records as cells finish. On an interrupt the servers are closed first, which wakes the threads that wait."""
    free: SimpleQueue[Runner] = SimpleQueue()
    for runner in runners:
        free.put(runner)

    def one(cell: Planned) -> Record:
        runner = free.get()
        try:
            return runner.run(cell)
        finally:
            free.put(runner)

    pool = ThreadPoolExecutor(max_workers=len(runners))
    try:
        for future in as_completed([pool.submit(one, cell) for cell in cells]):
            yield future.result()
    except BaseException:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not stop the cleaning up after the first
        pool.shutdown(wait=False, cancel_futures=True)
        for runner in runners:
            runner.close()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def recorded(records: Iterable[Record], file: RecordFile | None, total: int) -> Iterator[Record]:
    """Pass records on, each written to ``file`` and counted on a progress display."""
    bad = 0
    with progress(total) as bar:
        for record in records:
            if file is not None:
                file.add(record)
            bad += not record.expected
            bar.set_postfix_str(f"{bad} unexpected" if bad else outcome(record), refresh=False)
            bar.update()
            yield record


def progress(total: int) -> tqdm[NoReturn]:
    """A bar on standard error, gone when it is full; silent where nobody watches."""
    return tqdm(total=total, unit="cell", leave=False, disable=not sys.stderr.isatty())


def conclude(records: Sequence[Record], seconds: float, outputs: Outputs, complaints: Sequence[str] = ()) -> int:
    """Print the matrix, what the passes are worth, the failures and the summary, and write the files; the exit code.

    ``complaints`` name excuses that match nothing: they fail a run in which all else is as expected.
    """
    idle = "\n".join(f"UNMATCHED {words}" for words in complaints)
    parts = [matrix(records), sensitivity(records), failures(records), idle, summary(records, seconds)]
    click.echo("\n\n".join(part for part in parts if part))
    outputs.write(records, seconds)
    return exit_code(records) or int(bool(complaints))
