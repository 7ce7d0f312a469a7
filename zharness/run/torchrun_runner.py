"""Run cells on ranks that torchrun started."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from zharness.cell import Cell
from zharness.engines import Capabilities
from zharness.engines.registry import split_release
from zharness.engines.warm_up import GetEnvironment
from zharness.errors import UsageError
from zharness.parity.snapshot import evidence_path
from zharness.pytest_ranks.options import get_option
from zharness.pytest_ranks.torchrun_plugin import get_torchrun_plugin
from zharness.run import observe_and_judge
from zharness.run.cell_planner import PlannedCell
from zharness.run.expected_failures import ExpectedFailure
from zharness.run.pytest_cells import RUNNER_KEY, get_planned_cell, user_expected_failures
from zharness.run.record import Record
from zharness.run.runner import Runner, WithheldPolicy
from zharness.run.verdicts import make_failure_record, make_judged_record
from zharness.world import GroupMode, GroupOutcome, Isolation, RankTask, current_rank
from zharness.world.leader import Leader
from zharness.world.server import RankEnvironment, prepare_process
from zharness.world.store import StoreChannel

PREPARATION_TIMEOUT = 600.0  # seconds for the imports of all engines


class TorchrunRunner(Runner):
    """A runner that runs cells one after the other on the ranks that torchrun started.

    All cells share the ranks' processes, so global state that one engine leaves behind may affect the next engine. For
    example, DeepSpeed's stage 3 replaces torch.nn.functional.linear permanently and keeps the first process group.
    Cells of one world size share a process group until one of them fails. To separate engines or stages, start torchrun
    once for each engine or stage.

    The judge is not affected: its process is forked before any engine is imported, and it reads the ranks' evidence
    from files that rank 0 writes.
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
        """Create the runner of rank 0.

        Raises UsageError for two releases of one engine, because a process can import only one release.
        """
        names = [split_release(name)[0] for name in environments]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise UsageError(
                f"got several releases of {', '.join(repeated)}; torchrun's ranks run all cells, and a process can "
                "import only one release: start torchrun once for each release"
            )
        super().__init__(
            {}, timeout, seed, user_expected_failures=user_expected_failures, withheld_policy=withheld_policy
        )
        self._leader = leader
        self._environments = tuple(environments.values())
        self._servers = dict.fromkeys(environments, leader)
        self._current_record: Record | None = None

    def import_engines(self) -> None:
        """Import the engines on every rank. Raises UsageError if an import fails."""
        self._leader.task_title = "the import of the engines"
        world_size = self._leader.launch.world_size
        task = RankTask(prepare_environments, (self._environments,), world_size, PREPARATION_TIMEOUT, GroupMode.NONE)
        for rank, problem in enumerate(self._leader.submit(task).values()):
            if problem:
                raise UsageError(f"rank {rank}: {problem}")

    def claims(self, engine: str, stage: int) -> Capabilities:
        """Build the engine on the ranks of the launch, and return the capabilities that it claims at a stage."""
        self._leader.task_title = f"the probe of {engine}"
        return super().claims(engine, stage)

    def run(self, planned: PlannedCell) -> Record:
        """Run one cell and return its record: unsupported if the launch has fewer ranks than the cell's world size."""
        self._current_record = self._blank_record(planned.cell)
        ranks = self._leader.launch.world_size
        if planned.cell.world_size > ranks and not planned.unsupported_reason:
            planned = replace(
                planned,
                unsupported_reason=f"the cell needs {planned.cell.world_size} ranks, and torchrun started {ranks}",
                refused_feature=None,
            )
        return super().run(planned)

    def lost_cell_record(self, outcome: GroupOutcome | None, message: str) -> Record | None:
        """Return the record of the cell that ran when a rank was lost, or None if no cell had started.

        ``outcome`` is the outcome of the lost task, or None. If it is None, ``message`` is the cause in the record.
        """
        blank = self._current_record
        if blank is None:
            return None
        if outcome is None or outcome.cause is None:
            return replace(blank, cause=message)
        return make_failure_record(outcome, blank)

    def _observe_and_judge(
        self, cell: Cell, evidence_dir: Path, blank_record: Record, options: Mapping[str, Any], isolation: Isolation
    ) -> Record:
        """Run the cell on the ranks of the launch, write their evidence into files, and judge it.

        ``isolation`` applies to the judge; the cell always runs on the ranks of the launch.
        """
        claims = self.claims(cell.engine, cell.stage)
        self._leader.task_title = cell.id
        arguments = (cell, self.seed, claims, options)
        outcome = self._leader.submit(
            RankTask(observe_and_read_evidence, arguments, cell.world_size, self.timeout, GroupMode.REUSED)
        )
        if outcome.cause is not None:
            return self._conclude_rank_failure(outcome, blank_record, claims, isolation)
        for rank, evidence in enumerate(outcome.values()):
            evidence_path(evidence_dir, rank).write_bytes(evidence)
        judge_task = self._make_judge_task(cell, isolation, observe_and_judge.judge, str(evidence_dir), claims)
        return make_judged_record(self._judge_server.submit(judge_task), blank_record)

    def close(self) -> None:
        """End the judges' server, but not the leader, which the caller closes."""
        self._judge_server.close()


def prepare_environments(environments: tuple[RankEnvironment, ...]) -> str:
    """Apply the environments and import their engines, on every rank, and return the problems as text, or ''."""
    return "; ".join(problem for problem in map(prepare_process, environments) if problem)


def observe_and_read_evidence(cell: Cell, salt: int, capabilities: Capabilities, options: Mapping[str, Any]) -> bytes:
    """Run the law on the engine, on every rank, and return the bytes of the rank's evidence file.

    Rank 0 may not be able to read the file, because the file may be on another machine.
    """
    channel = current_rank().channel
    assert isinstance(channel, StoreChannel), "sent only to the ranks of a launch"
    with tempfile.TemporaryDirectory(dir=channel.scratch_dir) as evidence_dir:
        observe_and_judge.observe(cell, salt, evidence_dir, capabilities, options)
        return evidence_path(Path(evidence_dir), dist.get_rank()).read_bytes()


def start_torchrun_runner(session: pytest.Session, get_environment: GetEnvironment) -> None:
    """Start the runner for the cells of a pytest session on rank 0 of a torchrun launch."""
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
        timeout = get_option(session.config, "cell-timeout")
        environments = {name: get_environment(name) for name in names}
        runner = TorchrunRunner(
            plugin.leader, environments, timeout, user_expected_failures=user_expected_failures(session.config)
        )
        session.config.stash[RUNNER_KEY] = runner
        runner.import_engines()
