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
from zharness.case import Case
from zharness.engines import Capabilities, registry
from zharness.engines.registry import is_path, split
from zharness.errors import UsageError, WorldError
from zharness.run import cell, excuses
from zharness.run.excuses import Excuse
from zharness.run.locate import locate, trace, worth_locating
from zharness.run.plan import Planned
from zharness.run.record import Record, Verdict
from zharness.workload.foreign import is_foreign, taken_apart
from zharness.world import End, Group, GroupOutcome, Isolation, RankOutcome, RankServer, Work
from zharness.world.cores import share
from zharness.world.rank import gpus_asked_for
from zharness.world.server import Surroundings

# Code of this package that is under test like any engine: what it raises is the engine's doing, not the harness's.
UNDER_TEST = ("reference", "mutants")
JUDGE_TIMEOUT = 600.0  # the judge runs no engine, so only a bug of the harness could make it hang


class Withheld(Enum):
    """What becomes of cells whose feature the engine does not claim."""

    LEFT = "left"
    TRIED = "tried"  # run all the same; where the law holds, the record says that the claim is withheld


class Runner:
    """One rank server for each engine and one for the judges; create it before any tensor operation of the process.

    A context manager: on leaving, every server and every rank is gone.
    """

    def __init__(
        self,
        places: Mapping[str, Surroundings],
        timeout: float = 60.0,
        seed: int = 0,
        isolation: Isolation = Isolation.FRESH,
        own_excuses: Sequence[Excuse] = (),
        withheld: Withheld = Withheld.LEFT,
    ) -> None:
        """``isolation`` says whether the cells of one engine and stage may share ranks, one after the other.

        ``own_excuses`` come before those of the package. ``withheld`` says whether refused features are tried.
        """
        # torch loads some 800 modules at the first optimizer, DTensor or transform: once here, or in every rank again.
        importlib.import_module("torch._dynamo")
        self.timeout = timeout
        self.seed = seed
        self.isolation = isolation
        self.own_excuses = tuple(own_excuses)
        self.withheld = withheld
        self._servers = {name: RankServer(place) for name, place in places.items()}
        self._judges = RankServer()
        self._rooms: list[Path] = []  # of cells that passed
        self._claims: dict[tuple[str, int], Capabilities] = {}

    def claims(self, engine: str, stage: int) -> Capabilities:
        """What an engine claims at a stage; one known by its factory alone is built once, in a rank, to tell."""
        key = (engine, stage)
        if key not in self._claims:
            self._claims[key] = engines.capabilities(engine, stage) or probed(self._servers[engine], engine, stage)
        return self._claims[key]

    def ask(self, function: Callable[..., Any], model: str, *args: Any) -> Any:
        """What ``function(model, *args)`` returns in a judge's process, which may have imported that model already.

        Raises UsageError for what is the user's to mend, and for a process that crashed or hung, with its cause.
        """
        arguments = (model, *args)
        work = Work(
            function,
            arguments,
            timeout=self.timeout,
            group=Group.NONE,
            isolation=self.isolation,
            pool=origin(model),
        )
        outcome = self._judges.submit(work)
        if outcome.cause is not None:
            raise of_user(outcome.cause, f"{outcome.cause.words()}\n{outcome.describe()}")
        return outcome.ranks[0].value

    def attempt(self, case: Case, function: Callable[[Case, int, Capabilities], None]) -> Record | None:
        """The record of ``case`` where its ranks crash or hang in ``function``, which is asked of them first.

        None where they return. Raises UsageError for what ``function`` raises.
        """
        arguments = (case, self.seed, self.claims(case.engine, case.stage))
        outcome = self._servers[case.engine].submit(Work(function, arguments, case.world_size, self.timeout))
        cause = outcome.cause
        if cause is not None and cause.end is End.RAISED:
            raise of_user(cause, f"{cause.words()}\n{outcome.describe()}")
        return None if cause is None else broken(outcome, self._blank(case))

    def run(self, planned: Planned) -> Record:
        """The record of one cell. Pooled ranks, their judge and files serve the next one; others are gone by then."""
        began = time.monotonic()
        blank = self._blank(planned.case)
        if planned.unsupported:
            return replace(self._refused(planned, blank), seconds=time.monotonic() - began)
        record = self._tried(planned.case, blank, {})
        excuse = excuses.find(planned.case, blank.engine_version, self.own_excuses)
        if excuse is not None:
            record = excused(record, excuse)
            if record.excuse and excuse.documented:
                record = remedied(record, excuse, self._tried(planned.case, blank, excuse.remedy))
        return replace(record, seconds=time.monotonic() - began)

    def _refused(self, planned: Planned, blank: Record) -> Record:
        """The record of a cell that is not run, or run only to see whether the claim is withheld for nothing."""
        record = replace(blank, verdict=Verdict.UNSUPPORTED, cause=planned.unsupported)
        if planned.refused is None or self.withheld is Withheld.LEFT:
            return record
        tried = self._tried(planned.case, blank, {})
        return replace(record, withheld=planned.refused.value) if tried.verdict is Verdict.PASS else record

    def _tried(self, case: Case, blank: Record, options: Mapping[str, Any]) -> Record:
        """One go at a cell with these engine options; its files are the next one's to write over, where it passed."""
        room = self._rooms.pop() if self._rooms else Path(tempfile.mkdtemp(dir=self._judges.room))
        record = blank
        try:
            record = self._observed(case, room, blank, options)
        except WorldError as error:
            return replace(blank, cause=str(error))
        finally:
            if record.verdict is Verdict.PASS:
                self._rooms.append(room)
            else:
                shutil.rmtree(room, ignore_errors=True)
        return record

    def _blank(self, case: Case) -> Record:
        version = registry.version(case.engine) or "(no release)"
        return Record(case, self.seed, Verdict.ERROR, version, torch.__version__)

    def _observed(self, case: Case, room: Path, blank: Record, options: Mapping[str, Any]) -> Record:
        claims = self.claims(case.engine, case.stage)
        arguments = (case, self.seed, str(room), claims, options)
        # What an engine leaves in its process is left to cells of the same engine and stage alone, and with it the
        # group: DeepSpeed keeps the first one for good. The judge's process never sees an engine.
        work = Work(
            cell.observe,
            arguments,
            case.world_size,
            self.timeout,
            group=Group.KEPT,
            isolation=self.isolation,
            pool=f"stage {case.stage} {case.engine_variant} {origin(case.model)}",
        )
        outcome = self._servers[case.engine].submit(work)
        if outcome.cause is not None:
            return broken(outcome, blank)
        judging = Work(
            cell.judge,
            (case, self.seed, str(room), claims),
            timeout=JUDGE_TIMEOUT,
            group=Group.NONE,
            isolation=self.isolation,
            pool=origin(case.model),
        )
        record = judged_record(self._judges.submit(judging), blank)
        if not worth_locating(record.divergence, case, claims):
            return record
        return self._located(record, work, judging)

    def _located(self, record: Record, observed: Work, judged: Work) -> Record:
        """``record`` with the first module that departs, found on the ranks and by the judge of its own work."""
        mismatch = record.divergence
        assert mismatch is not None, "asked only about a wrong number"
        case, salt, room, claims = judged.args
        arguments = (case, salt, room, claims, mismatch.step)
        traced = self._judges.submit(replace(judged, function=trace, args=arguments))
        if traced.cause is not None:
            return record
        found = self._servers[case.engine].submit(replace(observed, function=locate, args=arguments))
        if found.cause is not None:
            return record
        words = found.ranks[mismatch.seen_on].value
        return replace(record, cause=f"{record.cause}; {words}", modules=words) if words else record

    def keep_to(self, cores: Collection[int]) -> None:
        """Have ranks and judges that start from now on run on these cores alone; anywhere, where there are none."""
        for server in {*self._servers.values(), self._judges}:
            server.keep_to(cores)

    def close(self) -> None:
        """End every server; what the cells wrote lies in a server's room, and goes with it."""
        for server in (*self._servers.values(), self._judges):
            server.close()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def keep_apart(runners: Sequence[Runner], cells: Sequence[Planned]) -> None:
    """Give each runner a core of its own, before its first cell, where they leave none idle.

    Models of the workload do next to nothing on a core. Anyone's own may need all that there are; ranks on GPUs have
    threads that wait.
    """
    busy = min(len(runners), sum(not cell.unsupported for cell in cells))
    if not gpus_asked_for() and not any(is_foreign(cell.case.model) for cell in cells):
        for lane, runner in enumerate(runners):
            runner.keep_to(share(lane, busy))


def origin(model: str) -> str:
    """The factory's path of anyone's model: where it is imported it may change what other cells find there."""
    return taken_apart(model)[0] if is_foreign(model) else ""


def probed(server: RankServer, engine: str, stage: int) -> Capabilities:
    """What an engine that is built in a rank claims there. Raises UsageError when it cannot be built."""
    outcome = server.run(cell.probe, engine, stage)
    failed = outcome.cause
    if failed is None:
        claims: Capabilities = outcome.ranks[0].value
        return claims
    raise of_user(failed, f"engine {engine!r} could not be built at stage {stage}: {failed.words()}")


def of_user(failed: RankOutcome, otherwise: str) -> UsageError:
    """What the user hears of a failure before any cell: this package's error in its own words, else ``otherwise``."""
    ours = failed.exception.startswith("zharness.errors.")
    return UsageError(failed.cause.partition(": ")[2] if ours else otherwise)


def surroundings(name: str) -> Surroundings:
    """What the rank server of an engine needs in its installed release. Raises UsageError for another release."""
    info = engines.require(name)
    if registry.version(name) != info.version():
        raise UsageError(
            f"{name} is not the installed release, {info.version()}; "
            f"install it with: pip install {info.distribution}=={split(name)[1] or 'RELEASE'}"
        )
    return Surroundings(search_path=search_path(name), warm_up=info.warm_up)


def search_path(name: str) -> tuple[str, ...]:
    """Where an engine that is known by its path alone is looked for: in the current directory."""
    return (os.getcwd(),) if is_path(name) else ()


def broken(outcome: GroupOutcome, blank: Record) -> Record:
    """The record of a cell in which a rank did not return: the first failure is the cause."""
    cause = outcome.cause
    assert cause is not None, "asked only about a group that failed"
    return replace(blank, verdict=verdict_of(cause), cause=cause.words(), details=outcome.describe())


def verdict_of(cause: RankOutcome) -> Verdict:
    """What the end of the rank that failed first makes of its group."""
    raised = who_raised(cause.exception, cause.innermost)
    return {End.HUNG: Verdict.HANG, End.RAISED: raised}.get(cause.end, Verdict.CRASH)


def who_raised(exception: str, innermost: str) -> Verdict:
    """Whose doing an exception is, from its type and the file of its innermost frame.

    A protocol that is not kept is a failure of the engine. A RuntimeError is torch's word for operands that it cannot
    take, wherever it shows. Any other exception out of this package's own code is a failure of the harness.
    """
    if exception.endswith(".EngineContractError"):
        return Verdict.FAIL
    package = Path(zharness.__file__).parent
    file = Path(innermost)
    ours = file.is_relative_to(package) and file.relative_to(package).parts[0] not in UNDER_TEST
    return Verdict.ERROR if ours and exception != "builtins.RuntimeError" else Verdict.CRASH


def judged_record(outcome: GroupOutcome, blank: Record) -> Record:
    """The record of a cell that was judged; a judge that failed is the harness's failure."""
    if outcome.cause is not None:
        return replace(blank, verdict=of_judge(outcome.cause), cause=outcome.cause.words(), details=outcome.describe())
    found: cell.Judgement = outcome.ranks[0].value
    verdict, cause = conclusion(found)
    return replace(
        blank,
        verdict=verdict,
        tier=found.tier.value,
        ratio=found.ratio,
        smallest=found.smallest,
        wrong_elements=found.wrong_elements,
        elements=found.elements,
        undetermined=found.undetermined,
        notes=found.notes,
        divergence=found.mismatch,
        evidence=found.exhibit,
        cause=cause,
    )


def of_judge(cause: RankOutcome) -> Verdict:
    """What the end of the judge makes of a cell: an engine that breaks its contract fails; else the harness did."""
    return Verdict.FAIL if cause.exception.endswith(".EngineContractError") else Verdict.ERROR


def conclusion(found: cell.Judgement) -> tuple[Verdict, str]:
    """The verdict of a judgement, and its cause where it is no pass."""
    if found.mismatch is not None:
        return Verdict.FAIL, found.mismatch.words()
    if found.undecided:
        share = f"{found.undetermined} of {found.elements} elements are smaller than the bound of their rounding"
        return Verdict.UNDETERMINED, f"{share}, so no mismatch shows nothing; compare in a wider dtype, or larger steps"
    return Verdict.PASS, ""


def excused(record: Record, excuse: Excuse) -> Record:
    """``record`` with the excuse that covers it, or with the word that the excuse is stale."""
    if record.verdict is Verdict.ERROR:
        return record
    if not record.verdict.broken:
        stale = f"{excuse.upstream} no longer shows here: narrow or delete its entry, {excuse.place}"
        return replace(record, stale=stale)
    if record.verdict.value != excuse.verdict or not excuse.tells_of(record.cause, record.details):
        return record
    return replace(record, excuse=excuse.upstream)


def remedied(record: Record, excuse: Excuse, second: Record) -> Record:
    """A documented difference is a contract when the documented remedy, which ``second`` ran, makes the law hold."""
    if second.verdict is Verdict.PASS:
        return replace(second, verdict=Verdict.CONTRACT, documented=excuse.documented, cause=excuse.reason)
    return replace(record, excuse="", cause=f"the documented remedy {dict(excuse.remedy)} fails: {second.cause}")
