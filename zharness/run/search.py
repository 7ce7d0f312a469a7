"""The smallest program that an engine gets wrong: one drawn by Hypothesis, cut down to what it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from zharness.checks.program import ACTS, LAYERS, MARKS
from zharness.engines import Capabilities
from zharness.engines.protocol import Feature
from zharness.errors import HarnessFault, UsageError
from zharness.run.programs import Outcome, ProgramRunner, command
from zharness.run.record import Verdict
from zharness.workload.legal import MANY, Batch, Limits, smaller_batches
from zharness.workload.programs import Act, Kind, Mark

BATCH = 8  # programs in the same ranks, one after the other: what ranks cost is paid once for all
PASSED = Outcome(Verdict.PASS)
T = TypeVar("T", Kind, Act, Mark)


@dataclass(frozen=True)
class Search:
    """What to search: so many batches of programs, all following from ``seed``, over these stages, sizes and dtypes.

    To look beyond a bug that is known: ``without`` are layers, verbs and marks that no program has, ``outputs`` is the
    most that a caller has in hand at once.
    """

    stages: Sequence[int]
    world_sizes: Sequence[int] = (2,)
    dtypes: Sequence[str] = ("fp32",)
    batches: int = 20
    seed: int = 0
    without: Sequence[str] = ()
    outputs: int = MANY


@dataclass(frozen=True)
class Found:
    """How many programs were run, and the smallest that failed, with its outcome, where one did.

    It is more than one where none of them fails alone: the last, in ranks that have run the others.
    """

    examples: int
    smallest: Batch = ()
    outcome: Outcome = PASSED

    def words(self, engine: str) -> str:
        """What was found, for a person."""
        if not self.smallest:
            return f"{self.examples} programs on {engine}, and none fails"
        told = self.outcome.words(engine, self.smallest)
        return f"{self.examples} programs on {engine}; the smallest that fails:\n{told}"


def search(runner: ProgramRunner, engine: str, wanted: Search) -> Found:
    """Run programs until one fails, then the smaller ones that fail as well, until none is smaller.

    Raises UsageError where Hypothesis is not installed or the engine claims nothing of what is wanted, HarnessFault
    when the harness itself failed.
    """
    try:
        from hypothesis import HealthCheck, Phase, find, settings
        from hypothesis.errors import NoSuchExample

        from zharness.workload.strategies import Repertoire, batches
    except ImportError as error:
        raise UsageError(f"programs are drawn by Hypothesis: pip install hypothesis ({error})") from error

    can = {stage: Repertoire(**allowed(wanted, runner.claims(engine, stage))) for stage in wanted.stages}
    seen: dict[Batch, Outcome] = {}

    def fails(batch: Batch) -> bool:
        if batch not in seen:
            seen[batch] = runner.run(engine, batch)
        if seen[batch].verdict is Verdict.ERROR:
            raise HarnessFault(f"{command(engine, batch)}: {seen[batch].cause}")
        return seen[batch].verdict.broken

    # The smallest is found by cuts in the program itself: in a third of the runs that the choices behind it would take.
    how = settings(
        max_examples=wanted.batches,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=[*HealthCheck],
    )
    drawn = batches(can, wanted.world_sizes, BATCH)
    try:
        failing = find(drawn, fails, settings=how, random=Random(wanted.seed))  # noqa: S311 - draws examples
    except NoSuchExample:
        return Found(sum(map(len, seen)))
    known = seen[failing].verdict

    def fails_alike(batch: Batch) -> bool:
        # A wrong number that shrinks into a hang is another bug, and each try of it takes the time-out.
        return fails(batch) and seen[batch].verdict is known

    smallest = shrunk(failing, fails_alike, can[failing[0].stage].limits)
    return Found(sum(map(len, seen)), smallest, seen[smallest])


def shrunk(batch: Batch, fails: Callable[[Batch], bool], limits: Limits) -> Batch:
    """A failing batch of which nothing more can be cut; every caller in it stays within ``limits``."""
    while True:
        less = next(filter(fails, smaller_batches(batch, limits)), None)
        if less is None:
            return batch
        batch = less


def allowed(wanted: Search, claims: Capabilities) -> dict[str, Any]:
    """The fields of the Repertoire for an engine that ``claims`` so. Raises UsageError for a name that is none."""
    known = [thing.value for axis in (Kind, Act, Mark) for thing in axis]
    for name in wanted.without:
        if name not in known:
            raise UsageError.unknown("layer, verb or mark to leave out", name, known)
    dtypes = tuple(dtype for dtype in wanted.dtypes if dtype in claims.dtypes)
    if not dtypes:
        raise UsageError.unknown("dtype of this engine", ",".join(wanted.dtypes), sorted(claims.dtypes))
    return {
        "limits": Limits(
            outputs=1 if claims.refusal(Feature.RETAIN_GRAPH) else wanted.outputs,
            accumulates=claims.refusal(Feature.CALLER_ACCUMULATION) is None,
        ),
        "kinds": rest(Kind, LAYERS, wanted, claims),
        "acts": rest(Act, ACTS, wanted, claims),
        "marks": rest(Mark, MARKS, wanted, claims),
        "dtypes": dtypes,
    }


def rest(axis: Iterable[T], needs: Mapping[T, Feature], wanted: Search, claims: Capabilities) -> tuple[T, ...]:
    """Those of ``axis`` that are wanted, and of which the engine claims what they need."""
    left = (thing for thing in axis if thing.value not in wanted.without)
    return tuple(thing for thing in left if thing not in needs or claims.refusal(needs[thing]) is None)
