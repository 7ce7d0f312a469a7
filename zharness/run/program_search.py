"""The smallest program that an engine gets wrong: one drawn by Hypothesis, cut down to what it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from zharness.engines import Capabilities
from zharness.engines.protocol import Feature
from zharness.errors import HarnessFault, UsageError
from zharness.law_kit.program_features import ACT_FEATURES, LAYER_FEATURES, MARK_FEATURES
from zharness.run.program_runner import ProgramOutcome, ProgramRunner, format_program_command
from zharness.run.record import Verdict
from zharness.workload.legal_programs import UNLIMITED_OUTPUTS, CallerLimits, ProgramBatch, smaller_batches
from zharness.workload.programs import Act, LayerKind, Mark

BATCH_SIZE = 8  # programs in the same ranks, one after the other: what ranks cost is paid once for all
PASS_OUTCOME = ProgramOutcome(Verdict.PASS)
T = TypeVar("T", LayerKind, Act, Mark)


@dataclass(frozen=True)
class SearchOptions:
    """What to search: so many batches of programs, all following from ``seed``, over these stages, sizes and dtypes.

    To look beyond a bug that is known: ``without`` are layers, verbs and marks that no program has, ``outputs`` is the
    most that a caller has in hand at once.
    """

    stages: Sequence[int]
    world_sizes: Sequence[int] = (2,)
    dtypes: Sequence[str] = ("fp32",)
    batches: int = 20
    seed: int = 0
    excluded_names: Sequence[str] = ()
    max_outputs: int = UNLIMITED_OUTPUTS


@dataclass(frozen=True)
class SearchResult:
    """How many programs were run, and the smallest that failed, with its outcome, where one did.

    It is more than one where none of them fails alone: the last, in ranks that have run the others.
    """

    program_count: int
    smallest: ProgramBatch = ()
    outcome: ProgramOutcome = PASS_OUTCOME

    def describe(self, engine: str) -> str:
        """What was found, for a person."""
        if not self.smallest:
            return f"{self.program_count} programs on {engine}, and none fails"
        told = self.outcome.describe(engine, self.smallest)
        return f"{self.program_count} programs on {engine}; the smallest that fails:\n{told}"


def search_programs(runner: ProgramRunner, engine: str, options: SearchOptions) -> SearchResult:
    """Run programs until one fails, then the smaller ones that fail as well, until none is smaller.

    Raises UsageError where Hypothesis is not installed or the engine claims nothing of what is wanted, HarnessFault
    when the harness itself failed.
    """
    try:
        from hypothesis import HealthCheck, Phase, find, settings
        from hypothesis.errors import NoSuchExample

        from zharness.workload.strategies import Repertoire, program_batches
    except ImportError as error:
        raise UsageError(f"programs are drawn by Hypothesis: pip install hypothesis ({error})") from error

    can = {stage: Repertoire(**repertoire_fields(options, runner.claims(engine, stage))) for stage in options.stages}
    seen: dict[ProgramBatch, ProgramOutcome] = {}

    def fails(batch: ProgramBatch) -> bool:
        if batch not in seen:
            seen[batch] = runner.run(engine, batch)
        if seen[batch].verdict is Verdict.ERROR:
            raise HarnessFault(f"{format_program_command(engine, batch)}: {seen[batch].cause}")
        return seen[batch].verdict.is_broken

    # The smallest is found by cuts in the program itself: in a third of the runs that the choices behind it would take.
    how = settings(
        max_examples=options.batches,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=[*HealthCheck],
    )
    drawn = program_batches(can, options.world_sizes, BATCH_SIZE)
    try:
        failing = find(drawn, fails, settings=how, random=Random(options.seed))  # noqa: S311 - draws examples
    except NoSuchExample:
        return SearchResult(sum(map(len, seen)))
    known = seen[failing].verdict

    def fails_alike(batch: ProgramBatch) -> bool:
        # A wrong number that shrinks into a hang is another bug, and each try of it takes the time-out.
        return fails(batch) and seen[batch].verdict is known

    smallest = shrink_batch(failing, fails_alike, can[failing[0].stage].limits)
    return SearchResult(sum(map(len, seen)), smallest, seen[smallest])


def shrink_batch(batch: ProgramBatch, fails: Callable[[ProgramBatch], bool], limits: CallerLimits) -> ProgramBatch:
    """A failing batch of which nothing more can be cut; every caller in it stays within ``limits``."""
    while True:
        less = next(filter(fails, smaller_batches(batch, limits)), None)
        if less is None:
            return batch
        batch = less


def repertoire_fields(options: SearchOptions, capabilities: Capabilities) -> dict[str, Any]:
    """The fields of the Repertoire for an engine that ``claims`` so. Raises UsageError for a name that is none."""
    known = [thing.value for axis in (LayerKind, Act, Mark) for thing in axis]
    for name in options.excluded_names:
        if name not in known:
            raise UsageError.unknown_name("layer, verb or mark to leave out", name, known)
    dtypes = tuple(dtype for dtype in options.dtypes if dtype in capabilities.dtypes)
    if not dtypes:
        raise UsageError.unknown_name("dtype of this engine", ",".join(options.dtypes), sorted(capabilities.dtypes))
    return {
        "limits": CallerLimits(
            max_outputs=1 if capabilities.refusal(Feature.RETAIN_GRAPH) else options.max_outputs,
            can_accumulate=capabilities.refusal(Feature.CALLER_ACCUMULATION) is None,
        ),
        "kinds": select_claimed(LayerKind, LAYER_FEATURES, options, capabilities),
        "acts": select_claimed(Act, ACT_FEATURES, options, capabilities),
        "marks": select_claimed(Mark, MARK_FEATURES, options, capabilities),
        "dtypes": dtypes,
    }


def select_claimed(
    axis: Iterable[T], needs: Mapping[T, Feature], options: SearchOptions, capabilities: Capabilities
) -> tuple[T, ...]:
    """Those of ``axis`` that are wanted, and of which the engine claims what they need."""
    left = (thing for thing in axis if thing.value not in options.excluded_names)
    return tuple(thing for thing in left if thing not in needs or capabilities.refusal(needs[thing]) is None)
