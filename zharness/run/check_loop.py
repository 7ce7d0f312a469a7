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

from zharness.cell import Cell, is_cell_id
from zharness.report.failures import render_failures, render_summary
from zharness.report.matrix import outcome_name, records_exit_code, render_matrix
from zharness.report.outputs import Outputs
from zharness.report.sensitivity import render_sensitivity
from zharness.run import PlannedCell, Record, Request, Runner, plan
from zharness.run.expected_failures import ExpectedFailure
from zharness.run.plan import shuffle_cells, validate_request
from zharness.run.record import RecordFile, open_record_file
from zharness.run.runner import WithheldPolicy, build_rank_environment, pin_runners_to_cores
from zharness.run.unmatched_failures import describe_unmatched_failures
from zharness.world import Isolation
from zharness.world.launch import detect_launch
from zharness.world.server import RankEnvironment


@dataclass(frozen=True)
class RunOptions:
    """How cells are run: seconds for one group of ranks, the salt of every seed, cells at a time, whose ranks.

    ``own`` are the user's excuses; ``withheld`` says whether features that an engine refuses are tried. ``shuffle`` is
    the seed of the order in which cells run; None: that of the matrix.
    """

    timeout: float = 60.0
    seed: int = 0
    jobs: int = 0
    isolation: Isolation = Isolation.FRESH
    user_expected_failures: tuple[ExpectedFailure, ...] = ()
    withheld_policy: WithheldPolicy = WithheldPolicy.SKIP
    shuffle_seed: int | None = None

    def create_runner(self, environments: Mapping[str, RankEnvironment]) -> Runner:
        """One lane's runner."""
        return Runner(
            environments, self.timeout, self.seed, self.isolation, self.user_expected_failures, self.withheld_policy
        )

    def order_cells(self, cells: Sequence[PlannedCell]) -> Sequence[PlannedCell]:
        """The cells in the order in which they run."""
        return cells if self.shuffle_seed is None else shuffle_cells(cells, self.shuffle_seed)

    def job_count(self) -> int:
        """Cells at a time: as asked, else one for each core, since half of a cell is start and judgement."""
        return self.jobs or max(1, os.cpu_count() or 1)


def run_check(
    request: Request,
    options: RunOptions,
    outputs: Outputs,
    get_environment: Callable[[str], RankEnvironment] = build_rank_environment,
) -> int:
    """Run every cell of ``request`` and report; the exit code of the command. Raises UsageError.

    ``place(engine)`` is what the rank server of an engine needs.
    """
    launch = detect_launch()
    if launch is not None:
        from zharness.run import torchrun_check_loop

        return torchrun_check_loop.run_torchrun_check(launch, request, options, outputs, get_environment)
    outputs.require_writable()
    began = time.monotonic()
    with ExitStack() as stack:
        sink = partial(open_optional_record_file, stack, outputs.jsonl)
        records, complaints = run_request(request, options, sink, get_environment)
    return report_run(records, time.monotonic() - began, outputs, complaints)


def open_optional_record_file(stack: ExitStack, path: Path | None) -> RecordFile | None:
    """The file of records, where one was asked for, until ``stack`` is left."""
    return stack.enter_context(open_record_file(path)) if path else None


def run_request(
    request: Request,
    options: RunOptions,
    open_sink: Callable[[], RecordFile | None],
    get_environment: Callable[[str], RankEnvironment],
) -> tuple[list[Record], list[str]]:
    """The records of every cell of ``request`` in the order of the matrix, and in words the excuses that match nothing.

    Each goes to the file of ``sink`` as it comes, which is asked for once there is something to run: a mistake in the
    request must not replace an earlier file. Raises UsageError.
    """
    validate_request(request)
    places = {name: get_environment(name) for name in requested_engines(request)}
    with ExitStack() as stack:
        runners = [stack.enter_context(options.create_runner(places)) for _ in range(options.job_count())]
        cells = plan(request, runners[0].claims)
        complaints = describe_unmatched_failures(cells, runners[0].claims, options.user_expected_failures)
        pin_runners_to_cores(runners, cells)
        found = list(write_with_progress(run_cells(options.order_cells(cells), runners), open_sink(), len(cells)))
    return sort_as_planned(found, cells), complaints


def sort_as_planned(records: Iterable[Record], cells: Sequence[PlannedCell]) -> list[Record]:
    """The records in the order of the matrix."""
    order = {cell.cell: position for position, cell in enumerate(cells)}
    return sorted(records, key=lambda record: order[record.cell])


def requested_engines(request: Request) -> list[str]:
    """The engines that the patterns or the axes of ``request`` name."""
    named = [Cell.parse(text).engine for text in request.patterns if is_cell_id(text)]
    rest = [] if named and len(named) == len(request.patterns) else list(request.engines)
    return list(dict.fromkeys([*named, *rest]))


def run_cells(cells: Sequence[PlannedCell], runners: Sequence[Runner]) -> Iterator[Record]:
    """Records as cells finish. On an interrupt the servers are closed first, which wakes the threads that wait."""
    free: SimpleQueue[Runner] = SimpleQueue()
    for runner in runners:
        free.put(runner)

    def run_on_free_runner(cell: PlannedCell) -> Record:
        runner = free.get()
        try:
            return runner.run(cell)
        finally:
            free.put(runner)

    pool = ThreadPoolExecutor(max_workers=len(runners))
    try:
        for future in as_completed([pool.submit(run_on_free_runner, cell) for cell in cells]):
            yield future.result()
    except BaseException:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not stop the cleaning up after the first
        pool.shutdown(wait=False, cancel_futures=True)
        for runner in runners:
            runner.close()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def write_with_progress(records: Iterable[Record], record_file: RecordFile | None, cell_count: int) -> Iterator[Record]:
    """Pass records on, each written to ``file`` and counted on a progress display."""
    bad = 0
    with progress_bar(cell_count) as bar:
        for record in records:
            if record_file is not None:
                record_file.add(record)
            bad += not record.is_expected
            bar.set_postfix_str(f"{bad} unexpected" if bad else outcome_name(record), refresh=False)
            bar.update()
            yield record


def progress_bar(total: int) -> tqdm[NoReturn]:
    """A bar on standard error, gone when it is full; silent where nobody watches."""
    return tqdm(total=total, unit="cell", leave=False, disable=not sys.stderr.isatty())


def report_run(
    records: Sequence[Record], seconds: float, outputs: Outputs, unmatched_failures: Sequence[str] = ()
) -> int:
    """Print the matrix, what the passes are worth, the failures and the summary, and write the files; the exit code.

    ``complaints`` name excuses that match nothing: they fail a run in which all else is as expected.
    """
    idle = "\n".join(f"UNMATCHED {words}" for words in unmatched_failures)
    parts = [
        render_matrix(records),
        render_sensitivity(records),
        render_failures(records),
        idle,
        render_summary(records, seconds),
    ]
    click.echo("\n\n".join(part for part in parts if part))
    outputs.write_reports(records, seconds)
    return records_exit_code(records) or int(bool(unmatched_failures))
