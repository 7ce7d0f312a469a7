"""Run planned cells on rank servers, which the runner forks before any tensor operation, and record the cells."""

from __future__ import annotations

import importlib
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from zharness.cell import Cell
from zharness.device import is_gpu_requested
from zharness.engines import Capabilities
from zharness.errors import UsageError, WorldError
from zharness.laws import get_law
from zharness.run import observe_and_judge
from zharness.run.cell_planner import PlannedCell
from zharness.run.claims import get_claims, get_engine_version, make_usage_error
from zharness.run.expected_failures import ExpectedFailure
from zharness.run.locate import can_locate_divergence, locate_divergence, record_baseline_trace
from zharness.run.matching_failures import (
    describe_known_cause,
    expects_exception,
    find_failure_with_remedy,
    find_matching_failure,
    find_pool_failure,
    list_crash_entries,
)
from zharness.run.rank_pool import RankPool, factory_path, name_pool, rank_pool
from zharness.run.record import Record, Verdict
from zharness.run.verdicts import (
    apply_expected_failure,
    apply_lacking_remedy,
    apply_remedy,
    blame_engine,
    is_raised_by_model,
    make_failure_record,
    make_judged_record,
    note_pool_difference,
)
from zharness.workload import model_spec
from zharness.workload.user_model import is_user_model
from zharness.world import GroupMode, GroupOutcome, Isolation, RankEnd, RankServer, RankTask
from zharness.world.cores import assign_cores
from zharness.world.server import RankEnvironment

JUDGE_TIMEOUT = 600.0  # seconds; the judge runs no engine, so it hangs only if the harness has a bug


class WithheldPolicy(Enum):
    """The treatment of cells that need a feature that the engine does not claim: skip or run them."""

    SKIP = "skip"
    TRY = "try"  # if the law holds although the feature is not claimed, the record names the feature as withheld


class Runner:
    """Runs cells on one rank server for each engine and one server for the judges.

    Create the runner before any tensor operation of the process, since ranks are forked. On exit, the context manager
    ends every server and rank.
    """

    def __init__(
        self,
        environments: Mapping[str, RankEnvironment],
        timeout: float = 60.0,
        seed: int = 0,
        isolation: Isolation = Isolation.FRESH,
        user_expected_failures: Sequence[ExpectedFailure] = (),
        withheld_policy: WithheldPolicy = WithheldPolicy.SKIP,
        observe: Callable[..., None] = observe_and_judge.observe,
    ) -> None:
        """Start the servers.

        ``environments`` maps the name of each engine to the environment of its rank server. ``timeout`` is the time
        limit for the ranks of one cell, in seconds.

        ``isolation`` determines whether the cells of one pool run one after the other on the same ranks. A cell that
        fails unexpectedly on shared ranks runs again on fresh ranks. ``user_expected_failures`` take
        precedence over the expected failures of the package. ``observe`` runs a cell's law on each rank.
        """
        # torch loads some 800 modules at the first optimizer, DTensor or transform: load them here, not in every rank.
        importlib.import_module("torch._dynamo")
        self.timeout = timeout
        self.seed = seed
        self.isolation = isolation
        self.user_expected_failures = tuple(user_expected_failures)
        self.withheld_policy = withheld_policy
        self._observe = observe
        self._servers = {name: RankServer(environment) for name, environment in environments.items()}
        self._judge_server = RankServer()
        self._free_evidence_dirs: list[Path] = []  # folders of passed cells; later cells overwrite their files
        self._claims: dict[tuple[str, int], Capabilities] = {}
        self._pools: dict[RankPool, set[str]] = {}  # the names of the rank pools that the cells of a pool have used

    def claims(self, engine: str, stage: int) -> Capabilities:
        """Return the capabilities that an engine claims at a stage. Raises UsageError if the engine cannot be built."""
        if (engine, stage) not in self._claims:
            self._claims[engine, stage] = get_claims(engine, stage, lambda: nullcontext(self._servers[engine]))
        return self._claims[engine, stage]

    def call_in_judge(self, function: Callable[..., Any], model: str, *args: Any) -> Any:
        """Return ``function(model, *args)``, called in a process of the judge's server.

        Pooled judges of one model share a process, which imports the model once. Raises UsageError if the function
        raises, crashes or hangs.
        """
        task = RankTask(
            function,
            (model, *args),
            timeout=self.timeout,
            group=GroupMode.NONE,
            isolation=self.isolation,
            pool=factory_path(model),
        )
        outcome = self._judge_server.submit(task)
        cause = outcome.cause
        if cause is not None and cause.end is not RankEnd.RAISED:
            raise UsageError(
                f"the process that builds and runs the model {model!r} ended early ({cause.describe()}); run the "
                "factory and a forward in a Python of its own to see why"
            )
        if cause is not None:
            raise make_usage_error(cause, f"{cause.describe()}\n{outcome.describe()}")
        return outcome.ranks[0].value

    def require_user_models(self, cells: Iterable[PlannedCell]) -> None:
        """Build each model of a user once. Raises UsageError, before any cell runs, if its factory returns no model."""
        names = dict.fromkeys(cell.cell.model for cell in cells if not cell.unsupported_reason)
        for name in filter(is_user_model, names):
            self.call_in_judge(require_buildable_model, name)

    def try_on_ranks(self, cell: Cell, function: Callable[[Cell, int, Capabilities], None]) -> Record | None:
        """Call ``function(cell, seed, capabilities)`` on the ranks of the pool of ``cell``.

        Returns a failure record if a rank crashes or hangs, else None. Raises UsageError if ``function`` raises.
        """
        arguments = (cell, self.seed, self.claims(cell.engine, cell.stage))
        task = RankTask(
            function,
            arguments,
            cell.world_size,
            self.timeout,
            group=GroupMode.REUSED,
            isolation=self.isolation,
            pool=self._open_pool(cell, self.isolation),
        )
        outcome = self._servers[cell.engine].submit(task)
        cause = outcome.cause
        if cause is not None and cause.end is RankEnd.RAISED:
            error = make_usage_error(cause, f"{cause.describe()}\n{outcome.describe()}")
            known = describe_known_cause(cell, get_engine_version(cell.engine), Verdict.CRASH.value, str(error), "")
            raise UsageError(f"{error}; {known}") if known else error
        return None if cause is None else make_failure_record(outcome, self._blank_record(cell))

    def run(self, planned: PlannedCell) -> Record:
        """Run one cell and return its record, with expected failures and documented remedies applied."""
        began = time.monotonic()
        blank = self._blank_record(planned.cell)
        isolation = self._choose_isolation(blank)
        if planned.unsupported_reason:
            return replace(self._record_refused(planned, blank, isolation), seconds=time.monotonic() - began)
        record = self._run_expecting_failure(planned.cell, blank, isolation)
        if isolation is Isolation.POOLED_AFTER_ERRORS and not record.is_expected:
            # After an error nobody closes the engine, so that another outcome on these ranks proves nothing about it.
            record = self._run_expecting_failure(planned.cell, blank, Isolation.FRESH)
        if isolation is Isolation.POOLED and not record.is_expected:
            # An earlier cell of the pool may have left state in the process: report the outcome on fresh ranks.
            fresh = self._run_expecting_failure(planned.cell, blank, Isolation.FRESH)
            explanation = find_pool_failure(
                *(planned.cell, blank.engine_version, record.verdict.value, record.cause, record.details),
                self.user_expected_failures,
            )
            record = note_pool_difference(record, fresh, explanation)
        return replace(record, seconds=time.monotonic() - began)

    def _choose_isolation(self, blank: Record) -> Isolation:
        """Return the isolation of a cell: that of the run, or another if the cell would end or change shared ranks."""
        if get_law(blank.cell.law).needs_fresh_ranks or self.isolation is Isolation.FRESH:
            return Isolation.FRESH
        entries = list_crash_entries(blank.cell, blank.engine_version, self.user_expected_failures)
        if not entries:
            return self.isolation
        return Isolation.POOLED_AFTER_ERRORS if all(map(expects_exception, entries)) else Isolation.FRESH

    def _open_pool(self, cell: Cell, isolation: Isolation) -> str:
        """Return the name of the pool on whose ranks a cell runs, and remember to close that pool."""
        name = name_pool(cell, isolation)
        self._pools.setdefault(rank_pool(cell), set()).add(name)
        return name

    def _run_expecting_failure(self, cell: Cell, blank_record: Record, isolation: Isolation) -> Record:
        """Run a cell, and apply the expected failure that covers the cell, and its documented remedy."""
        record = self._run_once(cell, blank_record, {}, isolation)
        version, user_failures = blank_record.engine_version, self.user_expected_failures
        expected = find_matching_failure(
            cell, version, record.verdict.value, record.cause, record.details, user_failures
        )
        if expected is not None:
            record = apply_expected_failure(record, expected)
            if record.expected_failure and expected.documented:
                lacking = self.claims(cell.engine, cell.stage).unknown_option(expected.remedy)
                if lacking:
                    return apply_lacking_remedy(record, expected, lacking)
                remedied = self._run_once(cell, blank_record, expected.remedy, isolation)
                second = find_failure_with_remedy(
                    cell, version, remedied.verdict.value, remedied.cause, remedied.details, user_failures
                )
                record = apply_remedy(record, expected, remedied, second)
        if is_user_model(cell.model) and not record.is_expected:
            known = describe_known_cause(cell, version, record.verdict.value, record.cause, record.details)
            return replace(record, notes=(*record.notes, known)) if known else record
        return record

    def _record_refused(self, planned: PlannedCell, blank_record: Record, isolation: Isolation) -> Record:
        """Return the record of an unsupported cell.

        With WithheldPolicy.TRY, the cell is run with ``isolation`` to find out whether its law holds.
        """
        record = replace(blank_record, verdict=Verdict.UNSUPPORTED, cause=planned.unsupported_reason)
        if planned.refused_feature is None or self.withheld_policy is WithheldPolicy.SKIP:
            return record
        trial = self._run_once(planned.cell, blank_record, {}, isolation)
        return (
            replace(record, withheld_feature=planned.refused_feature.value) if trial.verdict is Verdict.PASS else record
        )

    def _run_once(self, cell: Cell, blank_record: Record, options: Mapping[str, Any], isolation: Isolation) -> Record:
        """Run a cell once with the engine options ``options``, without applying expected failures."""
        evidence_dir = (
            self._free_evidence_dirs.pop()
            if self._free_evidence_dirs
            else Path(tempfile.mkdtemp(dir=self._judge_server.scratch_dir))
        )
        record = blank_record
        try:
            record = self._observe_and_judge(cell, evidence_dir, blank_record, options, isolation)
        except WorldError as error:
            return replace(blank_record, cause=str(error))
        finally:
            # A failed cell may leave files that the next cell does not overwrite; the judge would read them with it.
            if record.verdict is Verdict.PASS:
                self._free_evidence_dirs.append(evidence_dir)
            else:
                shutil.rmtree(evidence_dir, ignore_errors=True)
        return record

    def _blank_record(self, cell: Cell) -> Record:
        """Build the record of a cell that has not run yet, with the verdict ``error``."""
        return Record(cell, self.seed, Verdict.ERROR, get_engine_version(cell.engine), torch.__version__)

    def _observe_and_judge(
        self, cell: Cell, evidence_dir: Path, blank_record: Record, options: Mapping[str, Any], isolation: Isolation
    ) -> Record:
        """Run the cell on ranks, judge the evidence, and name the module where a local divergence begins."""
        claims = self.claims(cell.engine, cell.stage)
        # An engine changes global state of its process, and DeepSpeed keeps the first process group for good: only the
        # cells of one pool (rank_pool) share ranks. The judge's process never imports an engine.
        observe_task = RankTask(
            self._observe,
            (cell, self.seed, str(evidence_dir), claims, options),
            cell.world_size,
            self.timeout,
            group=GroupMode.REUSED,
            isolation=isolation,
            pool=self._open_pool(cell, isolation),
        )
        outcome = self._servers[cell.engine].submit(observe_task)
        if outcome.cause is not None:
            return self._conclude_rank_failure(outcome, blank_record, claims, isolation)
        judge_task = self._make_judge_task(cell, isolation, observe_and_judge.judge, str(evidence_dir), claims)
        timed_record = replace(
            blank_record,
            rank_cpu_seconds=sum(rank.cpu_seconds for rank in outcome.ranks),
            gpu_memory=tuple(rank.gpu_memory for rank in outcome.ranks if rank.gpu_memory is not None),
        )
        record = make_judged_record(self._judge_server.submit(judge_task), timed_record)
        if not can_locate_divergence(record.divergence, cell, claims):
            return record
        return self._locate_divergence(record, observe_task, judge_task)

    def _conclude_rank_failure(
        self, outcome: GroupOutcome, blank_record: Record, claims: Capabilities, isolation: Isolation
    ) -> Record:
        """Build the record of a cell in which a rank did not return.

        If a model's code raised, a judge runs the plain model. If plain PyTorch does not raise, the cell is a crash of
        the engine.
        """
        record = make_failure_record(outcome, blank_record)
        if record.verdict is not Verdict.ERROR or outcome.cause is None or not is_raised_by_model(outcome.cause):
            return record
        task = self._make_judge_task(record.cell, isolation, observe_and_judge.run_plain_model, claims)
        return blame_engine(record) if self._judge_server.submit(task).cause is None else record

    def _make_judge_task(
        self, cell: Cell, isolation: Isolation, function: Callable[..., object], *arguments: object
    ) -> RankTask:
        """Build the task that calls ``function(cell, seed, *arguments)`` in a process that never imports an engine."""
        return RankTask(
            function,
            (cell, self.seed, *arguments),
            timeout=JUDGE_TIMEOUT,
            group=GroupMode.NONE,
            isolation=Isolation.POOLED if isolation is Isolation.POOLED_AFTER_ERRORS else isolation,
            pool=factory_path(cell.model),
        )

    def _locate_divergence(self, record: Record, observe_task: RankTask, judge_task: RankTask) -> Record:
        """Add to ``record`` the first module whose numbers depart from the baseline's.

        The judge's server traces the baseline. Then the ranks run the engine and compare its modules with that trace.
        If either step fails, ``record`` is returned unchanged.
        """
        mismatch = record.divergence
        assert mismatch is not None, "called only for a record with a wrong number"
        arguments = (*judge_task.args, mismatch.step)
        traced = self._judge_server.submit(replace(judge_task, function=record_baseline_trace, args=arguments))
        if traced.cause is not None:
            return record
        server = self._servers[record.cell.engine]
        located = server.submit(replace(observe_task, function=locate_divergence, args=arguments))
        if located.cause is not None:
            return record
        departures = located.ranks[mismatch.seen_on].value
        if not departures:
            return record
        return replace(record, cause=f"{record.cause}; {departures}", module_departures=departures)

    def close_pools(self, needed: Container[RankPool]) -> None:
        """End the ranks of every pool that is not in ``needed``.

        An idle rank still wakes up 100 times a second in each of its process groups, which slows down running ranks.
        """
        for pool in [pool for pool in self._pools if pool not in needed]:
            for name in self._pools.pop(pool):
                self._servers[pool.engine].close_pool(name, pool.world_size)

    def close_judge(self, model: str) -> None:
        """End the pooled judge of a user's model, which keeps the model in memory."""
        self._judge_server.close_pool(factory_path(model), 1)

    def pin_to_cores(self, cores: Collection[int]) -> None:
        """Pin ranks and judges that start after this call to ``cores``. An empty collection changes nothing."""
        for server in {*self._servers.values(), self._judge_server}:
            server.pin_to_cores(cores)

    def close(self) -> None:
        """End every server; this also deletes the evidence of all cells, which is stored in the servers' folders."""
        for server in (*self._servers.values(), self._judge_server):
            server.close()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def require_buildable_model(name: str) -> None:
    """Build the model ``name``; the errors of its factory are UsageErrors."""
    model_spec(name).model(0)


def pin_runners_to_cores(runners: Sequence[Runner], cells: Sequence[PlannedCell]) -> None:
    """Pin each runner to one core, if there is a busy runner for every core. Call this before the first cell.

    Runs on GPUs and runs of a user's model are not pinned: ranks on GPUs have threads that wait, and a large model may
    use several cores.
    """
    busy_runners = min(len(runners), sum(not cell.unsupported_reason for cell in cells))
    if not is_gpu_requested() and not any(is_user_model(cell.cell.model) for cell in cells):
        for lane, runner in enumerate(runners):
            runner.pin_to_cores(assign_cores(lane, busy_runners))
