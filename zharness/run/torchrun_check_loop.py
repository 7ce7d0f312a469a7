"""Run ``zharness check`` under torchrun: rank 0 plans and reports the cells, and every process is a rank of a cell."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

import click

from zharness.engines.warm_up import GetEnvironment
from zharness.errors import UsageError
from zharness.run import Record, Request
from zharness.run.check_loop import (
    RunOptions,
    RunReporter,
    describe_coverage,
    describe_stop,
    find_stale_failures,
    open_optional_record_file,
    requested_engines,
    sort_as_planned,
)
from zharness.run.plan import plan_with_coverage, validate_request
from zharness.run.progress import write_with_progress
from zharness.run.record import RecordFile
from zharness.run.torchrun_runner import TorchrunRunner
from zharness.run.unmatched_failures import describe_unmatched_failures
from zharness.world import GroupOutcome
from zharness.world.launch import Launch
from zharness.world.launched_rank import Follower
from zharness.world.leader import Leader

LOST_RANK_EXIT_CODE = 1  # a rank is lost when its cell crashes or hangs, so a law is broken


def run_torchrun_check(
    launch: Launch, request: Request, options: RunOptions, reporter: RunReporter, get_environment: GetEnvironment
) -> int:
    """Run ``request`` on the ranks of ``launch``; return the exit code, which is the same on every rank.

    Raises UsageError on rank 0 only, but on every rank for options that do not work under torchrun.
    """
    if options.changes is not None or options.reach_file is not None or options.earlier_cells:
        unsupported = "--changed, --continue and --record-reach"
        raise UsageError(f"{unsupported} do not work under torchrun; run `zharness check` without it")
    if launch.rank:
        follower = Follower(launch)
        follower.answer_leader(lambda _: None)
        return follower.follow()
    run = TorchrunCheck(options, reporter)
    leader = Leader(launch, run.report_lost_rank)
    try:
        leader.follower_status = run.run_request(leader, request, get_environment)
    except UsageError:
        leader.follower_status = 2
        raise
    finally:
        leader.close()
    return leader.follower_status


@dataclass
class TorchrunCheck:
    """A run on rank 0.

    The leader's guard thread, which reports a lost rank, uses the records and files of this object.
    """

    options: RunOptions
    reporter: RunReporter
    records: list[Record] = field(default_factory=list)
    start_time: float = field(default_factory=time.monotonic)
    runner: TorchrunRunner | None = None
    planned_count: int = 0
    record_file: RecordFile | None = None
    exit_stack: ExitStack = field(default_factory=ExitStack)

    def run_request(self, leader: Leader, request: Request, get_environment: GetEnvironment) -> int:
        """Run every cell of ``request``, report, and return the exit code."""
        validate_request(request)
        self.reporter.require_writable()
        environments = {name: get_environment(name) for name in requested_engines(request)}
        with self.exit_stack:
            runner = self.runner = TorchrunRunner(
                leader,
                environments,
                self.options.timeout,
                self.options.seed,
                self.options.user_expected_failures,
                self.options.withheld_policy,
            )
            self.exit_stack.callback(runner.close)
            leader.ask_followers(None)
            runner.import_engines()
            planned = plan_with_coverage(request, runner.claims)
            cells = planned.cells
            self.planned_count = len(cells)
            unmatched_failures = describe_unmatched_failures(cells, runner.claims, self.options.user_expected_failures)
            self.record_file = open_optional_record_file(self.exit_stack, self.reporter.jsonl)
            stop, unexpected, began = self.options.stop, 0, time.monotonic()
            finished = map(runner.run, self.options.order_cells(cells))
            for record in write_with_progress(finished, self.record_file, len(cells)):
                self.records.append(record)
                unexpected += not record.is_expected
                if stop.has_failed(unexpected) or stop.is_over(time.monotonic() - began):
                    break
        records = sort_as_planned(self.records, cells)
        if len(records) < len(cells):
            return self.reporter.report_run(
                records, time.monotonic() - self.start_time, coverage=describe_stop(records, cells)
            )
        unmatched_failures += find_stale_failures(request, self.options, records)
        return self.reporter.report_run(
            records,
            time.monotonic() - self.start_time,
            unmatched_failures,
            describe_coverage(planned),
        )

    def report_lost_rank(self, outcome: GroupOutcome | None, message: str) -> int:
        """Report the finished cells and the cell during which a rank was lost; return the exit code."""
        last = self.runner.lost_cell_record(outcome, message) if self.runner is not None else None
        if last is not None:
            self.records.append(last)
            if self.record_file is not None:
                self.record_file.add(last)
        self.exit_stack.close()
        if self.records:
            self.reporter.report_run(self.records, time.monotonic() - self.start_time)
        click.echo(
            f"\nzharness: {message}; {len(self.records)} of {self.planned_count} cells were run", file=sys.stdout
        )
        return LOST_RANK_EXIT_CODE
