"""Cells on ranks that torchrun started."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from zharness.case import Case
from zharness.engines import Capabilities
from zharness.engines.registry import split
from zharness.errors import UsageError
from zharness.items.attached import attached
from zharness.parity.snapshot import path_of
from zharness.run import cell
from zharness.run.excuses import Excuse
from zharness.run.plan import Planned
from zharness.run.record import Record
from zharness.run.runner import JUDGE_TIMEOUT, Runner, Withheld, broken, judged_record
from zharness.run.session import RUNNER, cell_of, own_excuses
from zharness.world import Group, GroupOutcome, Work, here
from zharness.world.leader import Leader
from zharness.world.server import Surroundings, prepare
from zharness.world.store import StoreChannel

PREPARATION = 600.0  # seconds for the imports of all engines


class AttachedRunner(Runner):
    """A runner whose ranks are those of a launch, one cell after the other.

    They live on, so all cells share their processes, and what an engine leaves there the next cell finds: DeepSpeed's
    stage 3 replaces torch.nn.functional.linear for good, and keeps the first group that it saw. Cells of one world size
    share their group therefore, as long as none of them fails; who wants engines and stages apart starts torchrun once
    for each. The verdicts are not touched by that: the judge's process is forked before any engine is imported, and the
    ranks' evidence reaches it as files, by way of rank 0.
    """

    def __init__(
        self,
        leader: Leader,
        places: Mapping[str, Surroundings],
        timeout: float = 60.0,
        seed: int = 0,
        own_excuses: Sequence[Excuse] = (),
        withheld: Withheld = Withheld.LEFT,
    ) -> None:
        """Raises UsageError for two releases of one engine: a process can import only one."""
        names = [split(name)[0] for name in places]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UsageError(
                f"several releases of {', '.join(twice)}: the ranks of torchrun live on, and a process imports one; "
                "start torchrun once for each"
            )
        super().__init__({}, timeout, seed, own_excuses=own_excuses, withheld=withheld)
        self._leader = leader
        self._places = tuple(places.values())
        self._servers = dict.fromkeys(places, leader)
        self._current: Record | None = None

    def prepare(self) -> None:
        """Have every rank import the engines. Raises UsageError when that fails."""
        self._leader.title = "the import of the engines"
        everywhere = self._leader.launch.world_size
        work = Work(prepared, (self._places,), everywhere, PREPARATION, Group.NONE)
        for rank, trouble in enumerate(self._leader.submit(work).values()):
            if trouble:
                raise UsageError(f"rank {rank}: {trouble}")

    def claims(self, engine: str, stage: int) -> Capabilities:
        self._leader.title = f"the probe of {engine}"
        return super().claims(engine, stage)

    def run(self, planned: Planned) -> Record:
        self._current = self._blank(planned.case)
        ranks = self._leader.launch.world_size
        if planned.case.world_size > ranks and not planned.unsupported:
            planned = replace(
                planned, unsupported=f"world size {planned.case.world_size}: torchrun started {ranks}", refused=None
            )
        return super().run(planned)

    def lost(self, outcome: GroupOutcome | None, words: str) -> Record | None:
        """The record of the cell that was running when a rank was lost, if one was."""
        blank = self._current
        if blank is None:
            return None
        if outcome is None or outcome.cause is None:
            return replace(blank, cause=words)
        return broken(outcome, blank)

    def _observed(self, case: Case, room: Path, blank: Record, options: Mapping[str, Any]) -> Record:
        claims = self.claims(case.engine, case.stage)
        self._leader.title = case.id
        arguments = (case, self.seed, claims, options)
        outcome = self._leader.submit(Work(observed, arguments, case.world_size, self.timeout, Group.KEPT))
        if outcome.cause is not None:
            return broken(outcome, blank)
        for rank, evidence in enumerate(outcome.values()):
            path_of(room, rank).write_bytes(evidence)
        judging = Work(cell.judge, (case, self.seed, str(room), claims), timeout=JUDGE_TIMEOUT, group=Group.NONE)
        return judged_record(self._judges.submit(judging), blank)

    def close(self) -> None:
        """End the judges' server; the leader is its owner's to close."""
        self._judges.close()


def prepared(places: tuple[Surroundings, ...]) -> str:
    """In every rank: become what the ranks of these servers would be; in words what went wrong, or nothing."""
    return "; ".join(trouble for trouble in map(prepare, places) if trouble)


def observed(case: Case, salt: int, claims: Capabilities, options: Mapping[str, Any]) -> bytes:
    """In every rank: what it saw, as the bytes of its file; rank 0 may be on another machine."""
    channel = here().channel
    assert isinstance(channel, StoreChannel), "sent to the ranks of a launch only"
    with tempfile.TemporaryDirectory(dir=channel.room) as room:
        cell.observe(case, salt, room, claims, options)
        return path_of(Path(room), dist.get_rank()).read_bytes()


def start_runner(session: pytest.Session, place: Callable[[str], Surroundings]) -> None:
    """Have the cells of a pytest session run on the launch's ranks, by the one of rank 0."""
    plugin = attached(session.config)
    if plugin is None or plugin.leader is None:
        return
    cells = [planned for planned in map(cell_of, session.items) if planned is not None and not planned.unsupported]
    names = sorted({planned.case.engine for planned in cells})
    if names:
        timeout = session.config.getoption("--cell-timeout")
        places = {name: place(name) for name in names}
        runner = AttachedRunner(plugin.leader, places, timeout, own_excuses=own_excuses(session.config))
        session.config.stash[RUNNER] = runner
        runner.prepare()
