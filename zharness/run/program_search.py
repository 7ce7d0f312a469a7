"""Search for the smallest program that an engine gets wrong: draw programs by Hypothesis, and shrink a failing one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from zharness.engines import Capabilities
from zharness.engines.protocol import Feature
from zharness.errors import HarnessFault, UsageError
from zharness.law_kit.program_features import ACT_FEATURES, LAYER_FEATURES, MARK_FEATURES
from zharness.mesh import DEFAULT_MESH, Mesh
from zharness.run.mesh_claims import require_mesh
from zharness.run.program_runner import ProgramOutcome, ProgramRunner, format_program_command
from zharness.run.record import Verdict
from zharness.workload.legal_programs import UNLIMITED_OUTPUTS, CallerLimits, ProgramBatch, smaller_batches
from zharness.workload.programs import Act, LayerKind, Mark

BATCH_SIZE = 8  # programs that run one after the other on the same ranks, which are started once
PASS_OUTCOME = ProgramOutcome(Verdict.PASS)
T = TypeVar("T", LayerKind, Act, Mark)


@dataclass(frozen=True)
class SearchOptions:
    """The options of a search, which draws ``batches`` batches of programs from ``seed``.

    Programs are drawn for all ``stages``, ``world_sizes`` and ``dtypes`` on ``mesh``. Two options exclude a known bug
    from the search: ``excluded_names`` are layers, verbs and marks that programs must not use, and ``max_outputs``
    limits the outputs that a program keeps for backward at once.
    """

    stages: Sequence[int]
    world_sizes: Sequence[int] = (2,)
    dtypes: Sequence[str] = ("fp32",)
    batches: int = 20
    seed: int = 0
    excluded_names: Sequence[str] = ()
    max_outputs: int = UNLIMITED_OUTPUTS
    mesh: Mesh = DEFAULT_MESH


@dataclass(frozen=True)
class SearchResult:
    """The number of programs that ran, and the smallest failing batch with its outcome, if a batch failed.

    The batch has several programs if none of them fails alone: then the last program fails only on ranks that ran the
    other programs.
    """

    program_count: int
    smallest: ProgramBatch = ()
    outcome: ProgramOutcome = PASS_OUTCOME

    def describe(self, engine: str) -> str:
        """Describe the result for a terminal."""
        if not self.smallest:
            return f"{self.program_count} programs on {engine}: none fails"
        description = self.outcome.describe(engine, self.smallest)
        return f"{self.program_count} programs on {engine}; the smallest that fails:\n{description}"


def search_programs(runner: ProgramRunner, engine: str, options: SearchOptions) -> SearchResult:
    """Run programs until one fails, then smaller ones until no smaller one fails in the same way.

    Raises UsageError if Hypothesis is not installed or the engine does not claim the requested mesh or dtypes. Raises
    HarnessFault if the harness itself failed.
    """
    try:
        from hypothesis import HealthCheck, Phase, find, settings
        from hypothesis.errors import NoSuchExample

        from zharness.workload.strategies import Repertoire, program_batches
    except ImportError as error:
        raise UsageError(
            f"Hypothesis draws the programs, and cannot be imported ({error}); pip install hypothesis"
        ) from error

    claims_at = {stage: runner.claims(engine, stage) for stage in options.stages}
    for claims in claims_at.values():
        require_mesh(engine, options.mesh, options.world_sizes, claims)
    repertoires = {
        stage: Repertoire(**repertoire_fields(options, claims.on_mesh(options.mesh)))
        for stage, claims in claims_at.items()
    }
    outcomes: dict[ProgramBatch, ProgramOutcome] = {}

    def fails(batch: ProgramBatch) -> bool:
        """Return whether the engine gets a batch wrong; each batch is run only once."""
        if batch not in outcomes:
            outcomes[batch] = runner.run(engine, batch)
        if outcomes[batch].verdict is Verdict.ERROR:
            raise HarnessFault(f"{format_program_command(engine, batch)}: {outcomes[batch].cause}")
        return outcomes[batch].verdict.is_broken

    # Let Hypothesis only generate: shrink_batch cuts the program itself, which needs a third of the runs of Hypothesis'
    # own shrinking of choices.
    hypothesis_settings = settings(
        max_examples=options.batches,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=[*HealthCheck],
    )
    batches = program_batches(repertoires, options.world_sizes, BATCH_SIZE, options.mesh)
    try:
        failing = find(batches, fails, settings=hypothesis_settings, random=Random(options.seed))  # noqa: S311 - draws examples
    except NoSuchExample:
        return SearchResult(sum(map(len, outcomes)))
    verdict = outcomes[failing].verdict

    def fails_alike(batch: ProgramBatch) -> bool:
        """Return whether a smaller batch fails with the same verdict as the first failing batch."""
        # If a wrong number shrinks into a hang, that is another bug, and each run of a hang takes the whole time-out.
        return fails(batch) and outcomes[batch].verdict is verdict

    smallest = shrink_batch(failing, fails_alike, repertoires[failing[0].stage].limits)
    return SearchResult(sum(map(len, outcomes)), smallest, outcomes[smallest])


def shrink_batch(batch: ProgramBatch, fails: Callable[[ProgramBatch], bool], limits: CallerLimits) -> ProgramBatch:
    """Shrink a failing batch until no smaller one fails; every program in it stays within ``limits``."""
    while True:
        smaller = next(filter(fails, smaller_batches(batch, limits)), None)
        if smaller is None:
            return batch
        batch = smaller


def repertoire_fields(options: SearchOptions, capabilities: Capabilities) -> dict[str, Any]:
    """Return the fields of the Repertoire for an engine with these capabilities.

    Raises UsageError for an unknown name or if the engine claims none of the dtypes.
    """
    known = [member.value for axis in (LayerKind, Act, Mark) for member in axis]
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
    """Return the members of ``axis`` that are not excluded and whose features the engine claims."""
    allowed = (member for member in axis if member.value not in options.excluded_names)
    return tuple(member for member in allowed if member not in needs or capabilities.refusal(needs[member]) is None)
