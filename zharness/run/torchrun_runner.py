"""Cells on ranks that torchrun started."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from zharness.cell import Cell
from zharness.engines import Capabilities
from zharness.engines.registry import split_release
from zharness.errors import UsageError
from zharness.parity.snapshot import evidence_path
from zharness.pytest_ranks.torchrun_plugin import get_torchrun_plugin
from zharness.run import observe_and_judge
from zharness.run.expected_failures import ExpectedFailure
from zharness.run.plan import PlannedCell
from zharness.run.pytest_cells import RUNNER_KEY, get_planned_cell, user_expected_failures
from zharness.run.record import Record
from zharness.run.runner import JUDGE_TIMEOUT, Runner, WithheldPolicy, make_failure_record, make_judged_record
from zharness.world import Group, GroupOutcome, RankTask, current_rank
from zharness.world.leader import Leader
from zharness.world.server import RankEnvironment, prepare_process
from zharness.world.store import StoreChannel

PREPARATION_TIMEOUT = 600.0  # seconds for the imports of all engines


class TorchrunRunner(Runner):
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
        environments: Mapping[str, RankEnvironment],
        timeout: float = 60.0,
        seed: int = 0,
        user_expected_failures: Sequence[ExpectedFailure] = (),
        withheld_policy: WithheldPolicy = WithheldPolicy.SKIP,
    ) -> None:
        """Raises UsageError for two releases of one engine: a process can import only one."""
        names = [split_release(name)[0] for name in environments]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UsageError(
                f"several releases of {', '.join(twice)}: the ranks of torchrun live on, and a process imports one; "
                "start torchrun once for each"
            )
        super().__init__(
            {}, timeout, seed, user_expected_failures=user_expected_failures, withheld_policy=withheld_policy
        )
        self._leader = leader
        self._environments = tuple(environments.values())
        self._servers = dict.fromkeys(environments, leader)
        self._current_record: Record | None = None

    def import_engines(self) -> None:
        """Have every rank import the engines. Raises UsageError when that fails."""
        self._leader.task_title = "the import of the engines"
        everywhere = self._leader.launch.world_size
        work = RankTask(prepare_environments, (self._environments,), everywhere, PREPARATION_TIMEOUT, Group.NONE)
        for rank, trouble in enumerate(self._leader.submit(work).values()):
            if trouble:
                raise UsageError(f"rank {rank}: {trouble}")

    def claims(self, engine: str, stage: int) -> Capabilities:
        self._leader.task_title = f"the probe of {engine}"
        return super().claims(engine, stage)

    def run(self, planned: PlannedCell) -> Record:
        self._current_record = self._blank_record(planned.cell)
        ranks = self._leader.launch.world_size
        if planned.cell.world_size > ranks and not planned.unsupported_reason:
            planned = replace(
                planned,
                unsupported_reason=f"world size {planned.cell.world_size}: torchrun started {ranks}",
                refused_feature=None,
            )
        return super().run(planned)

    def lost_cell_record(self, outcome: GroupOutcome | None, message: str) -> Record | None:
        """The record of the cell that was running when a rank was lost, if one was."""
        blank = self._current_record
        if blank is None:
            return None
        if outcome is None or outcome.cause is None:
            return replace(blank, cause=message)
        return make_failure_record(outcome, blank)

    def _observe_and_judge(
        self, cell: Cell, evidence_dir: Path, blank_record: Record, options: Mapping[str, Any]
    ) -> Record:
        claims = self.claims(cell.engine, cell.stage)
        self._leader.task_title = cell.id
        arguments = (cell, self.seed, claims, options)
        outcome = self._leader.submit(
            RankTask(observe_and_read_evidence, arguments, cell.world_size, self.timeout, Group.REUSED)
        )
        if outcome.cause is not None:
            return make_failure_record(outcome, blank_record)
        for rank, evidence in enumerate(outcome.values()):
            evidence_path(evidence_dir, rank).write_bytes(evidence)
        judging = RankTask(
            observe_and_judge.judge,
            (cell, self.seed, str(evidence_dir), claims),
            timeout=JUDGE_TIMEOUT,
            group=Group.NONE,
        )
        return make_judged_record(self._judge_server.submit(judging), blank_record)

    def close(self) -> None:
        """End the judges' server; the leader is its owner's to close."""
        self._judge_server.close()


def prepare_environments(environments: tuple[RankEnvironment, ...]) -> str:
    """In every rank: become what the ranks of these servers would be; in words what went wrong, or nothing."""
    return "; ".join(trouble for trouble in map(prepare_process, environments) if trouble)


def observe_and_read_evidence(cell: Cell, salt: int, capabilities: Capabilities, options: Mapping[str, Any]) -> bytes:
    """In every rank: what it saw, as the bytes of its file; rank 0 may be on another machine."""
    channel = current_rank().channel
    assert isinstance(channel, StoreChannel), "sent to the ranks of a launch only"
    with tempfile.TemporaryDirectory(dir=channel.scratch_dir) as room:
        observe_and_judge.observe(cell, salt, room, capabilities, options)
        return evidence_path(Path(room), dist.get_rank()).read_bytes()


def start_torchrun_runner(session: pytest.Session, get_environment: Callable[[str], RankEnvironment]) -> None:
    """Have the cells of a pytest session run on the launch's ranks, by the one of rank 0."""
    plugin = get_torchrun_plugin(session.config)
    if plugin is None or plugin.leader is None:
        return
    cells = [
        planned
        for planned in map(get_planned_cell, session.items)
        if planned is not None and not planned.unsupported_reason
    ]
    names = sorted({planned.cell.engine for planned in cells})
    if names:
        timeout = session.config.getoption("--cell-timeout")
        places = {name: get_environment(name) for name in names}
        runner = TorchrunRunner(
            plugin.leader, places, timeout, user_expected_failures=user_expected_failures(session.config)
        )
        session.config.stash[RUNNER_KEY] = runner
        runner.import_engines()
