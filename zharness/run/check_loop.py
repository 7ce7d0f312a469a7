"""Run the loop of ``zharness check``: plan the cells, run them on several lanes, and pass the records to a reporter."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from tempfile import mkdtemp
from threading import Lock
from typing import Protocol

from zharness.cell import Cell, is_cell_id
from zharness.device import choose_job_count
from zharness.engines.warm_up import GetEnvironment
from zharness.run import PlannedCell, Record, Request, Runner, observe_and_judge
from zharness.run.cell_queue import CellGrouping, CellQueue, group_by_pool, keep_order
from zharness.run.changed_cells import ChangeSelection, select_changed_cells
from zharness.run.expected_failures import ExpectedFailure
from zharness.run.interrupts import ignore_interrupts
from zharness.run.missing_claims import describe_missing_claims
from zharness.run.plan import (
    ARRAY_WORLD_SIZES,
    ClaimsLookup,
    Plan,
    plan_with_coverage,
    shuffle_cells,
    validate_request,
)
from zharness.run.progress import write_with_progress
from zharness.run.rank_pool import rank_pool
from zharness.run.reach import (
    CellReach,
    ReachRecorder,
    name_in_record,
    observe_with_reach,
    open_reach_recorder,
    read_earlier_reach,
)
from zharness.run.record import RecordFile, open_record_file
from zharness.run.runner import WithheldPolicy, pin_runners_to_cores
from zharness.run.stale_failures import describe_stale_failures
from zharness.run.unmatched_failures import describe_unmatched_failures
from zharness.world import Isolation
from zharness.world.launch import detect_launch
from zharness.world.server import RankEnvironment


class RunReporter(Protocol):
    """The interface that reports the records of a run, implemented by ``zharness.report.outputs.Outputs``."""

    @property
    def jsonl(self) -> Path | None:
        """Return the path of the file that gets one JSON line per cell while cells run, or None if there is no file."""
        ...

    def require_writable(self) -> None:
        """Raise UsageError if a file cannot be written. Call this method before a long run."""
        ...

    def report_run(
        self,
        records: Sequence[Record],
        seconds: float,
        unmatched_failures: Sequence[str] = (),
        coverage: Sequence[str] = (),
    ) -> int:
        """Report a finished run, and return the exit code of the command."""
        ...


@dataclass(frozen=True)
class Stop:
    """The number of unexpected outcomes, and the seconds, after which no further cell starts; 0 sets no limit."""

    failures: int = 0
    seconds: float = 0.0

    def has_failed(self, failures: int) -> bool:
        """Return whether the run has to stop after this number of unexpected outcomes."""
        return bool(self.failures) and failures >= self.failures

    def is_over(self, seconds: float) -> bool:
        """Return whether the run has to stop after this number of seconds."""
        return bool(self.seconds) and seconds >= self.seconds


NEVER = Stop()


@dataclass(frozen=True)
class RunOptions:
    """The options that determine how the cells of a run are run.

    ``timeout`` is the time limit in seconds for the ranks of one cell. ``seed`` is mixed into the seed of every cell.
    ``jobs`` is the number of cells that run at a time; 0 means one cell per core. ``shuffle_seed`` determines the order
    in which cells run; None keeps the order of the matrix. ``stop`` says when a run stops early. If ``changes`` is not
    None, only the cells that reach a changed function of an engine run. If ``reach_file`` is not None, the run writes
    the functions that each cell reaches into that file. ``earlier_cells`` have run before, and do not run again.
    """

    timeout: float = 60.0
    seed: int = 0
    jobs: int = 0
    isolation: Isolation = Isolation.FRESH
    user_expected_failures: tuple[ExpectedFailure, ...] = ()
    withheld_policy: WithheldPolicy = WithheldPolicy.SKIP
    shuffle_seed: int | None = None
    stop: Stop = NEVER
    changes: ChangeSelection | None = None
    reach_file: Path | None = None
    earlier_cells: frozenset[Cell] = frozenset()

    def create_runner(self, environments: Mapping[str, RankEnvironment], reach_folder: Path | None = None) -> Runner:
        """Create the runner of one lane, with a rank server for each of ``environments``.

        If ``reach_folder`` is not None, ranks write the functions that they reach into that folder.
        """
        expected, observe = self.user_expected_failures, observe_and_judge.observe
        if reach_folder is not None:
            observe = partial(observe_with_reach, str(reach_folder))
        return Runner(environments, self.timeout, self.seed, self.isolation, expected, self.withheld_policy, observe)

    def read_earlier_reach(self) -> Mapping[str, CellReach]:
        """Return the recorded reach of the earlier cells, if this run records reach. Raises UsageError."""
        return read_earlier_reach(self.reach_file, self.earlier_cells) if self.reach_file is not None else {}

    def ran_earlier(self, planned: PlannedCell, earlier_reach: Mapping[str, CellReach]) -> bool:
        """Return whether a cell has run before; if this run records reach, its recorded reach must also be known."""
        if planned.cell not in self.earlier_cells or self.reach_file is None:
            return planned.cell in self.earlier_cells
        return bool(planned.unsupported_reason) or name_in_record(planned.cell) in earlier_reach

    def order_cells(self, cells: Sequence[PlannedCell]) -> Sequence[PlannedCell]:
        """Return the cells in the order in which they run, the cells of one pool of ranks one after the other.

        Cells that were selected for a change keep their order, in which the cells that are likely to fail come first.
        """
        if self.changes is not None:
            return cells
        if self.shuffle_seed is not None:
            return shuffle_cells(cells, self.shuffle_seed)
        order = {pool: number for number, pool in enumerate(dict.fromkeys(rank_pool(cell.cell) for cell in cells))}
        return sorted(cells, key=lambda cell: order[rank_pool(cell.cell)])

    @property
    def grouping(self) -> CellGrouping:
        """The function that groups cells, of which a runner prefers one group: by pool, unless the order is fixed."""
        return group_by_pool if self.changes is None and self.shuffle_seed is None else keep_order

    def job_count(self) -> int:
        """Return the number of cells to run at a time; by default one per core."""
        # A cell of two ranks does not need two cores: half of its time is start-up and judging.
        return self.jobs or choose_job_count(max(ARRAY_WORLD_SIZES))


@dataclass(frozen=True)
class RunResult:
    """The records of a run in the order of the matrix.

    ``unmatched_failures`` has a sentence for each expected failure that matched no cell, or that names options and
    matched only cells that pass. ``coverage`` has a sentence for each engine with the number of covered pairs, and a
    sentence for each claim that would add cells.
    """

    records: list[Record]
    unmatched_failures: list[str]
    coverage: list[str]


class RunInterrupted(KeyboardInterrupt):
    """Raised if Ctrl-C ended a run; ``records`` has the finished cells, ``cell_count`` is the number of all cells."""

    def __init__(self, records: Sequence[Record], cell_count: int) -> None:
        super().__init__()
        self.records = records
        self.cell_count = cell_count


def describe_coverage(planned: Plan) -> list[str]:
    """Return a sentence for each engine with its covered pairs, and a sentence with the laws that the law set lacks."""
    coverage = [f"{engine}: {covering.describe()}" for engine, covering in planned.coverings.items()]
    if planned.left_out:
        reasons = [f"{name}: {reason}" for name, reason in planned.left_out.items()]
        coverage.append("\n  ".join((f"left out by the pinned law set: {len(reasons)} law variants", *reasons)))
    return coverage


def run_check(request: Request, options: RunOptions, reporter: RunReporter, get_environment: GetEnvironment) -> int:
    """Run every cell of ``request``, report the records, and return the command's exit code.

    ``get_environment(engine)`` returns the environment of an engine's rank server. On Ctrl-C, the finished cells are
    reported. Raises UsageError if the request cannot be run or an output file cannot be written.
    """
    launch = detect_launch()
    if launch is not None:
        from zharness.run import torchrun_check_loop

        return torchrun_check_loop.run_torchrun_check(launch, request, options, reporter, get_environment)
    reporter.require_writable()
    began = time.monotonic()
    with ExitStack() as stack:
        open_sink = partial(open_optional_record_file, stack, reporter.jsonl)
        try:
            result = run_request(request, options, open_sink, get_environment)
        except RunInterrupted as interrupted:
            if interrupted.records:
                sentence = f"INTERRUPTED after {len(interrupted.records)} of {interrupted.cell_count} cells"
                with ignore_interrupts():  # an impatient second Ctrl-C would leave the reports half-written
                    reporter.report_run(interrupted.records, time.monotonic() - began, coverage=[sentence])
            raise
    return reporter.report_run(result.records, time.monotonic() - began, result.unmatched_failures, result.coverage)


def open_optional_record_file(stack: ExitStack, path: Path | None) -> RecordFile | None:
    """Open the record file at ``path`` until ``stack`` is closed, or return None if ``path`` is None."""
    return stack.enter_context(open_record_file(path)) if path else None


def run_request(
    request: Request,
    options: RunOptions,
    open_sink: Callable[[], RecordFile | None],
    get_environment: GetEnvironment,
) -> RunResult:
    """Run every cell of ``request``. Raises UsageError for a request that cannot be run.

    ``open_sink`` opens the file to which each record is written when its cell ends. ``open_sink`` is called after the
    request was validated, so that a mistake in the request does not replace an earlier file.
    """
    validate_request(request)
    environments = {name: get_environment(name) for name in requested_engines(request)}
    with ExitStack() as stack:
        reach_folder = stack.enter_context(open_scratch_folder()) if options.reach_file else None
        lanes = range(options.job_count())
        runners = [stack.enter_context(options.create_runner(environments, reach_folder)) for _ in lanes]
        claims = runners[0].claims
        cells, coverage = select_cells(request, claims, options.changes)
        unmatched_failures = describe_unmatched_failures(cells, claims, options.user_expected_failures)
        earlier_reach = options.read_earlier_reach()
        rest = [cell for cell in cells if not options.ran_earlier(cell, earlier_reach)]
        runners[0].require_user_models(rest)
        pin_runners_to_cores(runners, rest)
        sink = open_sink()
        finished = run_cells(options.order_cells(rest), runners, options.stop, options.grouping)
        if reach_folder is not None and options.reach_file is not None:
            recorder = stack.enter_context(open_reach_recorder(reach_folder, options.reach_file, earlier_reach))
            finished = record_reach(finished, recorder)
        records = collect_records(finished, sink, rest)
        missing_claims = describe_missing_claims(cells, claims)
    stopped = describe_stop(records, rest)
    if options.changes is not None:
        return RunResult(records, [], [*coverage, *stopped])
    if len(records) < len(cells):
        # An expected failure that no finished cell needed may belong to a cell that did not run.
        return RunResult(records, [], stopped)
    stale_failures = find_stale_failures(request, options, records)
    return RunResult(records, [*unmatched_failures, *stale_failures], [*coverage, *missing_claims])


@contextmanager
def open_scratch_folder() -> Iterator[Path]:
    """Create a temporary folder, and delete it at the end of the ``with`` block, even if Ctrl-C is pressed again."""
    folder = Path(mkdtemp())
    try:
        yield folder
    finally:
        with ignore_interrupts():
            shutil.rmtree(folder)


def select_cells(
    request: Request, claims: ClaimsLookup, changes: ChangeSelection | None
) -> tuple[Sequence[PlannedCell], list[str]]:
    """Return the cells of ``request``, or those that reach a changed function, and sentences on what they cover."""
    if changes is None:
        planned = plan_with_coverage(request, claims)
        return planned.cells, describe_coverage(planned)
    selected = select_changed_cells(request, claims, changes)
    return selected.cells, [selected.description]


def describe_stop(records: Sequence[Record], cells: Sequence[PlannedCell]) -> list[str]:
    """Return a sentence if the run stopped early: how many cells ran, and which laws did not run; else no sentence."""
    if len(records) == len(cells):
        return []
    laws = sorted({cell.cell.law for cell in cells} - {record.cell.law for record in records})
    left = f"; these laws did not run: {', '.join(laws)}" if laws else ""
    return [f"STOPPED after {len(records)} of {len(cells)} cells{left}"]


def record_reach(records: Iterable[Record], recorder: ReachRecorder) -> Iterator[Record]:
    """Yield each of ``records`` after adding the functions that its cell reached to ``recorder``."""
    for record in records:
        recorder.add(record)
        yield record


def collect_records(finished: Iterable[Record], sink: RecordFile | None, cells: Sequence[PlannedCell]) -> list[Record]:
    """Write each record when its cell ends, and return all records in the order of ``cells``.

    Raises RunInterrupted, with the records so far, on Ctrl-C.
    """
    records: list[Record] = []
    try:
        for record in write_with_progress(finished, sink, len(cells)):
            records.append(record)
    except KeyboardInterrupt:
        raise RunInterrupted(sort_as_planned(records, cells), len(cells)) from None
    return sort_as_planned(records, cells)


def find_stale_failures(request: Request, options: RunOptions, records: Sequence[Record]) -> list[str]:
    """Describe the expected failures for options that no cell of a run needed.

    Returns [] if every pattern is a cell id, because such a run cannot tell.
    """
    if request.patterns and all(map(is_cell_id, request.patterns)):
        return []
    return describe_stale_failures(records, options.user_expected_failures)


def sort_as_planned(records: Iterable[Record], cells: Sequence[PlannedCell]) -> list[Record]:
    """Sort records in the order of ``cells``."""
    order = {cell.cell: position for position, cell in enumerate(cells)}
    return sorted(records, key=lambda record: order[record.cell])


def requested_engines(request: Request) -> list[str]:
    """Return the engines that the cells of ``request`` need.

    These are the engines named in cell ids, and also the request's ``engines`` unless all its patterns are cell ids.
    """
    from_ids = [Cell.parse(text).engine for text in request.patterns if is_cell_id(text)]
    others = [] if from_ids and len(from_ids) == len(request.patterns) else list(request.engines)
    return list(dict.fromkeys([*from_ids, *others]))


def run_cells(
    cells: Sequence[PlannedCell], runners: Sequence[Runner], stop: Stop = NEVER, grouping: CellGrouping = keep_order
) -> Iterator[Record]:
    """Run the cells on free runners, and yield records as cells end. A runner prefers the cells of one group.

    After ``stop``, no further cell starts. At the time limit, wait for running cells and report them, since they may be
    the first cells that fail; at the failure limit, discard them. A runner ends a pool of ranks that no later cell
    needs. On an interrupt, the runners' servers are closed first, which wakes the threads that wait for their ranks.
    """
    lock, cells_left = Lock(), Counter(rank_pool(cell.cell) for cell in cells)
    free_runners: SimpleQueue[Runner] = SimpleQueue()
    for runner in runners:
        free_runners.put(runner)
    queue = CellQueue(cells, grouping)

    def run_next_cell() -> Record:
        """Wait for a free runner, and run the next cell for it."""
        runner = free_runners.get()
        cell = queue.take(runner)
        pool = rank_pool(cell.cell)
        try:
            runner.close_pools(needed=cells_left)
            return runner.run(cell)
        finally:
            with lock:
                cells_left[pool] -= 1
                if not cells_left[pool]:
                    del cells_left[pool]
            free_runners.put(runner)

    threads, unexpected, began = ThreadPoolExecutor(max_workers=len(runners)), 0, time.monotonic()
    try:
        futures = [threads.submit(run_next_cell) for _ in cells]
        left = set(futures)
        for future in as_completed(futures):
            left.remove(future)
            record = future.result()
            yield record
            unexpected += not record.is_expected
            if stop.is_over(time.monotonic() - began):
                threads.shutdown(wait=False, cancel_futures=True)
                running = [each for each in left if not each.cancelled()]
                yield from (each.result() for each in as_completed(running))
                return
            if stop.has_failed(unexpected):
                return
    except BaseException:
        with ignore_interrupts():  # a second Ctrl-C would stop the clean-up and leave ranks behind
            threads.shutdown(wait=False, cancel_futures=True)
            for runner in runners:
                runner.close()
            threads.shutdown(wait=True)
        raise
    finally:
        threads.shutdown(wait=True, cancel_futures=True)
