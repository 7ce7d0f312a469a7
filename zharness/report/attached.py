"""``torchrun ... -m zharness check``: rank 0 runs and reports, the other processes are its ranks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import click

from zharness.errors import UsageError
from zharness.report.live import Options, as_planned, conclude, engines_of, recorded
from zharness.report.outputs import Outputs
from zharness.run import Record, Request, plan
from zharness.run.attached import AttachedRunner
from zharness.run.plan import validate
from zharness.run.record import RecordFile, record_file
from zharness.run.unmatched import unmatched
from zharness.world import GroupOutcome
from zharness.world.attachment import Follower
from zharness.world.launched import Launch
from zharness.world.leader import Leader
from zharness.world.server import Surroundings

LOST = 1  # the exit code when a rank is lost: a cell crashed or hung, and with it the law is broken


def check(
    launch: Launch, request: Request, options: Options, outputs: Outputs, place: Callable[[str], Surroundings]
) -> int:
    """The exit code of the command, the same on every rank. Raises UsageError, on rank 0 alone."""
    if launch.rank:
        follower = Follower(launch)
        follower.meet(lambda _: None)
        return follower.follow()
    run = Run(options, outputs)
    leader = Leader(launch, run.last_words)
    try:
        leader.status = run.checked(leader, request, place)
    except UsageError:
        leader.status = 2
        raise
    finally:
        leader.close()
    return leader.status


@dataclass
class Run:
    """The records so far, and where they go: by whichever thread writes them."""

    options: Options
    outputs: Outputs
    records: list[Record] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    runner: AttachedRunner | None = None
    planned: int = 0
    file: RecordFile | None = None
    files: ExitStack = field(default_factory=ExitStack)

    def checked(self, leader: Leader, request: Request, place: Callable[[str], Surroundings]) -> int:
        """Run every cell of ``request`` and report."""
        validate(request)
        self.outputs.check_writable()
        places = {name: place(name) for name in engines_of(request)}
        with self.files:
            runner = self.runner = AttachedRunner(
                leader, places, self.options.timeout, self.options.seed, self.options.own, self.options.withheld
            )
            self.files.callback(runner.close)
            leader.meet(None)
            runner.prepare()
            cells = plan(request, runner.claims)
            self.planned = len(cells)
            complaints = unmatched(cells, runner.claims, self.options.own)
            self.file = self.files.enter_context(record_file(self.outputs.jsonl)) if self.outputs.jsonl else None
            for record in recorded(map(runner.run, self.options.ordered(cells)), self.file, len(cells)):
                self.records.append(record)
        return conclude(as_planned(self.records, cells), time.monotonic() - self.began, self.outputs, complaints)

    def last_words(self, outcome: GroupOutcome | None, words: str) -> int:
        """Report what there is, with the cell during which a rank was lost."""
        last = self.runner.lost(outcome, words) if self.runner is not None else None
        if last is not None:
            self.records.append(last)
            if self.file is not None:
                self.file.add(last)
        self.files.close()
        if self.records:
            conclude(self.records, time.monotonic() - self.began, self.outputs)
        click.echo(f"\nzharness: {words}; {len(self.records)} of {self.planned} cells were run", file=sys.stdout)
        return LOST
