"""The runner: cells in, records out, on rank servers that were forked before anything else happened."""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch

import zharness
from zharness import engines
from zharness.cell import Cell
from zharness.engines import Capabilities, registry
from zharness.engines.registry import is_factory_path, split_release
from zharness.errors import UsageError, WorldError
from zharness.run import expected_failures, observe_and_judge
from zharness.run.expected_failures import ExpectedFailure
from zharness.run.locate import can_locate_divergence, locate_divergence, record_baseline_trace
from zharness.run.plan import PlannedCell
from zharness.run.record import Record, Verdict
from zharness.workload.user_model import is_user_model, parse_user_model_name
from zharness.world import Group, GroupOutcome, Isolation, RankEnd, RankOutcome, RankServer, RankTask
from zharness.world.cores import assign_cores
from zharness.world.rank import is_gpu_requested
from zharness.world.server import RankEnvironment

# Code of this package that is under test like any engine: what it raises is the engine's doing, not the harness's.
PACKAGES_UNDER_TEST = ("reference", "mutants")
JUDGE_TIMEOUT = 600.0  # the judge runs no engine, so only a bug of the harness could make it hang


class WithheldPolicy(Enum):
    """What becomes of cells whose feature the engine does not claim."""

    SKIP = "left"
    TRY = "tried"  # run all the same; where the law holds, the record says that the claim is withheld


class Runner:
    """One rank server for each engine and one for the judges; create it before any tensor operation of the process.

    A context manager: on leaving, every server and every rank is gone.
    """

    def __init__(
        self,
        environments: Mapping[str, RankEnvironment],
        timeout: float = 60.0,
        seed: int = 0,
        isolation: Isolation = Isolation.FRESH,
        user_expected_failures: Sequence[ExpectedFailure] = (),
        withheld_policy: WithheldPolicy = WithheldPolicy.SKIP,
    ) -> None:
        """``isolation`` says whether the cells of one engine and stage may share ranks, one after the other.

        ``own_excuses`` come before those of the package. ``withheld`` says whether refused features are tried.
        """
        # torch loads some 800 modules at the first optimizer, DTensor or transform: once here, or in every rank again.
        importlib.import_module("torch._dynamo")
        self.timeout = timeout
        self.seed = seed
        self.isolation = isolation
        self.user_expected_failures = tuple(user_expected_failures)
        self.withheld_policy = withheld_policy
        self._servers = {name: RankServer(place) for name, place in environments.items()}
        self._judge_server = RankServer()
        self._free_evidence_dirs: list[Path] = []  # of cells that passed
        self._claims: dict[tuple[str, int], Capabilities] = {}

    def claims(self, engine: str, stage: int) -> Capabilities:
        """What an engine claims at a stage; one known by its factory alone is built once, in a rank, to tell."""
        key = (engine, stage)
        if key not in self._claims:
            self._claims[key] = engines.capabilities(engine, stage) or probe_engine(
                self._servers[engine], engine, stage
            )
        return self._claims[key]

    def call_in_judge(self, function: Callable[..., Any], model: str, *args: Any) -> Any:
        """What ``function(model, *args)`` returns in a judge's process, which may have imported that model already.

        Raises UsageError for what is the user's to mend, and for a process that crashed or hung, with its cause.
        """
        arguments = (model, *args)
        work = RankTask(
            function,
            arguments,
            timeout=self.timeout,
            group=Group.NONE,
            isolation=self.isolation,
            pool=factory_path(model),
        )
        outcome = self._judge_server.submit(work)
        if outcome.cause is not None:
            raise make_usage_error(outcome.cause, f"{outcome.cause.describe()}\n{outcome.describe()}")
        return outcome.ranks[0].value

    def try_on_ranks(self, cell: Cell, function: Callable[[Cell, int, Capabilities], None]) -> Record | None:
        """The record of ``case`` where its ranks crash or hang in ``function``, which is asked of them first.

        None where they return. Raises UsageError for what ``function`` raises.
        """
        arguments = (cell, self.seed, self.claims(cell.engine, cell.stage))
        outcome = self._servers[cell.engine].submit(RankTask(function, arguments, cell.world_size, self.timeout))
        cause = outcome.cause
        if cause is not None and cause.end is RankEnd.RAISED:
            raise make_usage_error(cause, f"{cause.describe()}\n{outcome.describe()}")
        return None if cause is None else make_failure_record(outcome, self._blank_record(cell))

    def run(self, planned: PlannedCell) -> Record:
        """The record of one cell. Pooled ranks, their judge and files serve the next one; others are gone by then."""
        began = time.monotonic()
        blank = self._blank_record(planned.cell)
        if planned.unsupported_reason:
            return replace(self._record_refused(planned, blank), seconds=time.monotonic() - began)
        record = self._run_once(planned.cell, blank, {})
        excuse = expected_failures.find_expected_failure(
            planned.cell, blank.engine_version, self.user_expected_failures
        )
        if excuse is not None:
            record = apply_expected_failure(record, excuse)
            if record.expected_failure and excuse.documented:
                record = apply_remedy(record, excuse, self._run_once(planned.cell, blank, excuse.remedy))
        return replace(record, seconds=time.monotonic() - began)

    def _record_refused(self, planned: PlannedCell, blank_record: Record) -> Record:
        """The record of a cell that is not run, or run only to see whether the claim is withheld for nothing."""
        record = replace(blank_record, verdict=Verdict.UNSUPPORTED, cause=planned.unsupported_reason)
        if planned.refused_feature is None or self.withheld_policy is WithheldPolicy.SKIP:
            return record
        tried = self._run_once(planned.cell, blank_record, {})
        return (
            replace(record, withheld_feature=planned.refused_feature.value) if tried.verdict is Verdict.PASS else record
        )

    def _run_once(self, cell: Cell, blank_record: Record, options: Mapping[str, Any]) -> Record:
        """One go at a cell with these engine options; its files are the next one's to write over, where it passed."""
        room = (
            self._free_evidence_dirs.pop()
            if self._free_evidence_dirs
            else Path(tempfile.mkdtemp(dir=self._judge_server.scratch_dir))
        )
        record = blank_record
        try:
            record = self._observe_and_judge(cell, room, blank_record, options)
        except WorldError as error:
            return replace(blank_record, cause=str(error))
        finally:
            if record.verdict is Verdict.PASS:
                self._free_evidence_dirs.append(room)
            else:
                shutil.rmtree(room, ignore_errors=True)
        return record

    def _blank_record(self, cell: Cell) -> Record:
        version = registry.resolve_version(cell.engine) or "(no release)"
        return Record(cell, self.seed, Verdict.ERROR, version, torch.__version__)

    def _observe_and_judge(
        self, cell: Cell, evidence_dir: Path, blank_record: Record, options: Mapping[str, Any]
    ) -> Record:
        claims = self.claims(cell.engine, cell.stage)
        arguments = (cell, self.seed, str(evidence_dir), claims, options)
        # What an engine leaves in its process is left to cells of the same engine and stage alone, and with it the
        # group: DeepSpeed keeps the first one for good. The judge's process never sees an engine.
        work = RankTask(
            observe_and_judge.observe,
            arguments,
            cell.world_size,
            self.timeout,
            group=Group.REUSED,
            isolation=self.isolation,
            pool=f"stage {cell.stage} {cell.engine_variant} {factory_path(cell.model)}",
        )
        outcome = self._servers[cell.engine].submit(work)
        if outcome.cause is not None:
            return make_failure_record(outcome, blank_record)
        judging = RankTask(
            observe_and_judge.judge,
            (cell, self.seed, str(evidence_dir), claims),
            timeout=JUDGE_TIMEOUT,
            group=Group.NONE,
            isolation=self.isolation,
            pool=factory_path(cell.model),
        )
        record = make_judged_record(self._judge_server.submit(judging), blank_record)
        if not can_locate_divergence(record.divergence, cell, claims):
            return record
        return self._locate_divergence(record, work, judging)

    def _locate_divergence(self, record: Record, observe_task: RankTask, judge_task: RankTask) -> Record:
        """``record`` with the first module that departs, found on the ranks and by the judge of its own work."""
        mismatch = record.divergence
        assert mismatch is not None, "asked only about a wrong number"
        case, salt, room, claims = judge_task.args
        arguments = (case, salt, room, claims, mismatch.step)
        traced = self._judge_server.submit(replace(judge_task, function=record_baseline_trace, args=arguments))
        if traced.cause is not None:
            return record
        found = self._servers[case.engine].submit(replace(observe_task, function=locate_divergence, args=arguments))
        if found.cause is not None:
            return record
        words = found.ranks[mismatch.seen_on].value
        return replace(record, cause=f"{record.cause}; {words}", module_departures=words) if words else record

    def pin_to_cores(self, cores: Collection[int]) -> None:
        """Have ranks and judges that start from now on run on these cores alone; anywhere, where there are none."""
        for server in {*self._servers.values(), self._judge_server}:
            server.pin_to_cores(cores)

    def close(self) -> None:
        """End every server; what the cells wrote lies in a server's room, and goes with it."""
        for server in (*self._servers.values(), self._judge_server):
            server.close()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pin_runners_to_cores(runners: Sequence[Runner], cells: Sequence[PlannedCell]) -> None:
    """Give each runner a core of its own, before its first cell, where they leave none idle.

    Models of the workload do next to nothing on a core. Anyone's own may need all that there are; ranks on GPUs have
    threads that wait.
    """
    busy = min(len(runners), sum(not cell.unsupported_reason for cell in cells))
    if not is_gpu_requested() and not any(is_user_model(cell.cell.model) for cell in cells):
        for lane, runner in enumerate(runners):
            runner.pin_to_cores(assign_cores(lane, busy))


def factory_path(model: str) -> str:
    """The factory's path of anyone's model: where it is imported it may change what other cells find there."""
    return parse_user_model_name(model)[0] if is_user_model(model) else ""


def probe_engine(server: RankServer, engine: str, stage: int) -> Capabilities:
    """What an engine that is built in a rank claims there. Raises UsageError when it cannot be built."""
    outcome = server.run(observe_and_judge.probe_capabilities, engine, stage)
    failed = outcome.cause
    if failed is None:
        claims: Capabilities = outcome.ranks[0].value
        return claims
    raise make_usage_error(failed, f"engine {engine!r} could not be built at stage {stage}: {failed.describe()}")


def make_usage_error(failure: RankOutcome, fallback_message: str) -> UsageError:
    """What the user hears of a failure before any cell: this package's error in its own words, else ``otherwise``."""
    ours = failure.exception.startswith("zharness.errors.")
    return UsageError(failure.cause.partition(": ")[2] if ours else fallback_message)


def build_rank_environment(name: str) -> RankEnvironment:
    """What the rank server of an engine needs in its installed release. Raises UsageError for another release."""
    info = engines.require(name)
    if registry.resolve_version(name) != info.version():
        raise UsageError(
            f"{name} is not the installed release, {info.version()}; "
            f"install it with: pip install {info.distribution}=={split_release(name)[1] or 'RELEASE'}"
        )
    return RankEnvironment(search_path=engine_search_path(name), warm_up=info.warm_up)


def engine_search_path(name: str) -> tuple[str, ...]:
    """Where an engine that is known by its path alone is looked for: in the current directory."""
    return (os.getcwd(),) if is_factory_path(name) else ()


def make_failure_record(outcome: GroupOutcome, blank_record: Record) -> Record:
    """The record of a cell in which a rank did not return: the first failure is the cause."""
    cause = outcome.cause
    assert cause is not None, "asked only about a group that failed"
    return replace(
        blank_record, verdict=verdict_of_rank_failure(cause), cause=cause.describe(), details=outcome.describe()
    )


def verdict_of_rank_failure(cause: RankOutcome) -> Verdict:
    """What the end of the rank that failed first makes of its group."""
    raised = verdict_of_exception(cause.exception, cause.innermost_file)
    return {RankEnd.HUNG: Verdict.HANG, RankEnd.RAISED: raised}.get(cause.end, Verdict.CRASH)


def verdict_of_exception(exception: str, innermost: str) -> Verdict:
    """Whose doing an exception is, from its type and the file of its innermost frame.

    A protocol that is not kept is a failure of the engine. A RuntimeError is torch's word for operands that it cannot
    take, wherever it shows. Any other exception out of this package's own code is a failure of the harness.
    """
    if exception.endswith(".EngineContractError"):
        return Verdict.FAIL
    package = Path(zharness.__file__).parent
    file = Path(innermost)
    ours = file.is_relative_to(package) and file.relative_to(package).parts[0] not in PACKAGES_UNDER_TEST
    return Verdict.ERROR if ours and exception != "builtins.RuntimeError" else Verdict.CRASH


def make_judged_record(outcome: GroupOutcome, blank_record: Record) -> Record:
    """The record of a cell that was judged; a judge that failed is the harness's failure."""
    if outcome.cause is not None:
        return replace(
            blank_record,
            verdict=verdict_of_judge_failure(outcome.cause),
            cause=outcome.cause.describe(),
            details=outcome.describe(),
        )
    found: observe_and_judge.Judgement = outcome.ranks[0].value
    verdict, cause = conclude_judgement(found)
    return replace(
        blank_record,
        verdict=verdict,
        tier=found.tier.value,
        ratio=found.ratio,
        smallest_scale_error=found.smallest_scale_error,
        wrong_elements=found.wrong_elements,
        elements=found.elements,
        undetermined=found.undetermined,
        notes=found.notes,
        divergence=found.mismatch,
        evidence=found.exhibit,
        cause=cause,
    )


def verdict_of_judge_failure(cause: RankOutcome) -> Verdict:
    """What the end of the judge makes of a cell: an engine that breaks its contract fails; else the harness did."""
    return Verdict.FAIL if cause.exception.endswith(".EngineContractError") else Verdict.ERROR


def conclude_judgement(judgement: observe_and_judge.Judgement) -> tuple[Verdict, str]:
    """The verdict of a judgement, and its cause where it is no pass."""
    if judgement.mismatch is not None:
        return Verdict.FAIL, judgement.mismatch.describe()
    if judgement.is_inconclusive:
        share = (
            f"{judgement.undetermined} of {judgement.elements} elements are smaller than the bound of their rounding"
        )
        return Verdict.UNDETERMINED, f"{share}, so no mismatch shows nothing; compare in a wider dtype, or larger steps"
    return Verdict.PASS, ""


def apply_expected_failure(record: Record, expected_failure: ExpectedFailure) -> Record:
    """``record`` with the excuse that covers it, or with the word that the excuse is stale."""
    if record.verdict is Verdict.ERROR:
        return record
    if not record.verdict.is_broken:
        stale = (
            f"{expected_failure.upstream} no longer shows here: narrow or delete its entry, {expected_failure.location}"
        )
        return replace(record, stale_reason=stale)
    if record.verdict.value != expected_failure.verdict or not expected_failure.matches_failure(
        record.cause, record.details
    ):
        return record
    return replace(record, expected_failure=expected_failure.upstream)


def apply_remedy(record: Record, expected_failure: ExpectedFailure, remedy_record: Record) -> Record:
    """A documented difference is a contract when the documented remedy, which ``second`` ran, makes the law hold."""
    if remedy_record.verdict is Verdict.PASS:
        return replace(
            remedy_record,
            verdict=Verdict.CONTRACT,
            documentation_url=expected_failure.documented,
            cause=expected_failure.reason,
        )
    return replace(
        record,
        expected_failure="",
        cause=f"the documented remedy {dict(expected_failure.remedy)} fails: {remedy_record.cause}",
    )
