"""Find the smallest failure like that of a cell: with fewer ranks, a smaller model, and then as a small program."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from zharness.cell import Cell
from zharness.engines import Capabilities
from zharness.errors import UsageError
from zharness.export.model_candidates import count_parameter_owners, models_without_modules, smaller_models
from zharness.law_kit.given_programs import join_variant
from zharness.law_kit.program_features import explain_unsupported
from zharness.law_kit.program_templates import TEMPLATES_BY_MODEL
from zharness.law_kit.record_comparisons import STALE_FORWARD_HINT
from zharness.law_kit.setting import SEPARATOR
from zharness.laws import get_law
from zharness.mesh import Mesh
from zharness.run.plan import make_program_cell, plan_named_cell
from zharness.run.program_runner import ProgramOutcome, ProgramRunner
from zharness.run.program_search import PASS_OUTCOME, SearchOptions, SearchResult, search_programs, shrink_batch
from zharness.run.record import Record, Verdict
from zharness.run.runner import Runner
from zharness.workload.legal_programs import NO_LIMITS, ProgramBatch, legal_verbs
from zharness.workload.program_text import parse_layers, parse_program
from zharness.workload.programs import SOURCE_KINDS, Program
from zharness.workload.user_model import is_user_model
from zharness.world import Isolation
from zharness.world.server import RankEnvironment

# Groups of laws whose failures a program can show; other groups concern saved state, memory or casts.
TRAINING_LAW_GROUPS = ("training", "backward", "double_backward", "torch_func", "checkpointing", "parameters", "model")
# Programs tried before random ones: most faults of an engine show in one of these.
FIRST_PROGRAMS = (
    "x(1) linear(1) | f b s",
    "x(2) linear(1) | f b s f b s",
    "x(3) matrix(2) relu linear(2) norm | f b s f b s f b s",
    "x(2) linear(3) | f b f b s f b s",
    "x(3) linear(2) | f b:retain b:other s f b s",
    "x(3) linear(3) | f b:tensor s f b:tensor,retain z b:tensor,other s",
    "x(2) linear(2) norm | f b s f z e i f b s",
    "x(2) linear(1) | f b v s v f b s",
    "x(3) twice[linear(3) relu] matrix(1) | f f b:old b s n f b s",
    "tokens(5,3) norm tied | f b s f b s",
    "x(2) linear(2) checkpoint[linear(3) relu] linear(1) | f b s f b s",
)
# Engines treat unused parameters specially, and unrelated faults look alike there.
EXCLUDED_LAYERS = ("unused", "sometimes")
PROGRAM_LAYERS = {  # layers like those of the workload's models
    "mlp": "x(3) linear(4) gelu linear(2)",
    "changing": "x(3) linear(3) frozen(3) sometimes[linear(3)] unused(2) read(2)",
}
MAX_OTHER_MODELS = 1  # number of the workload's models to try in place of a user's model
MAX_SEARCH_BATCHES = 40  # batches of random programs to try; the time limit usually ends the search earlier


@dataclass(frozen=True)
class FailureSignature:
    """The facts that identify a failure: verdict, part of the step or exception type, and hint or message.

    ``failure_kind`` is the part of the step or the exception type. ``detail`` is the hint or the message, from which
    numbers and names are removed, since they depend on the model. If a norm is wrong because it counts shared elements
    repeatedly, ``replica_axes`` has the sets of mesh axes whose ranks may share them; for another failure it is empty.
    """

    verdict: Verdict
    failure_kind: str
    detail: str = ""
    replica_axes: frozenset[frozenset[str]] = frozenset()

    def can_match(self, other: FailureSignature) -> bool:
        """Return whether ``other`` may be the same failure; if ``detail`` is empty, it matches any other detail.

        A norm on a smaller mesh has to count elements repeatedly that are shared by ranks of the same axes, or of some
        of these axes.
        """
        return (
            (self.verdict, self.failure_kind) == (other.verdict, other.failure_kind)
            and self.detail in ("", other.detail)
            and (
                not self.replica_axes
                or any(fewer <= axes for axes in self.replica_axes for fewer in other.replica_axes)
            )
        )


_PROGRAM_SUFFIX = re.compile(r"(; )?at the end of '([^']*)'$")  # the program that an any_order law appends
_COORDINATES = re.compile(r"((; )?rank \d+ is [a-z_]+ \d+(, [a-z_]+ \d+)*)+$")  # differ on a smaller mesh
# One of several axes whose ranks a norm counts repeatedly: a smaller mesh has fewer of these axes.
_REPLICAS = re.compile(r"what \d+ ranks of (?P<axis>\w+) have in common \d+ times(,? (and|or) (?=what))?")
# Numbers, names with dots or digits, and quoted text, which differ between models.
_LIST_OF_NAMES = re.compile(r"#(, #)+")  # after the substitution of names by #
_MODEL_SPECIFIC = re.compile(r"'[^']*'|\"[^\"]*\"|[\w.]*\d[\w.+]*|\w+(?:\.\w+)+")


def extract_failure_signature(verdict: Verdict, cause: str) -> FailureSignature:
    """Return the signature of the failure that ``verdict`` and ``cause`` describe."""
    part = re.match(r"step \d+, ([a-z ]+):", cause)
    if part:
        hint = _COORDINATES.sub("", cause.rpartition("); ")[2]) if "); " in cause else ""
        hint, axes = _REPLICAS.sub("", _PROGRAM_SUFFIX.sub("", hint)), find_replica_axes(hint)
        if hint.startswith(STALE_FORWARD_HINT):  # any part of the step that reads a forward's result may have this hint
            return FailureSignature(verdict, STALE_FORWARD_HINT)
        # "only 1 of 16 elements" cannot be seen in a model with one element.
        detail = "" if hint.startswith("only ") else _MODEL_SPECIFIC.sub("#", hint)
        return FailureSignature(verdict, part[1], detail, axes)
    raised = re.search(r"raised: (\w+)(?:: ([^\n]*))?", cause)
    return (
        FailureSignature(verdict, raised[1], _LIST_OF_NAMES.sub("#", _MODEL_SPECIFIC.sub("#", raised[2] or "")))
        if raised
        else FailureSignature(verdict, "")
    )


def find_replica_axes(hint: str) -> frozenset[frozenset[str]]:
    """Return the alternatives of ``hint``: sets of axes whose ranks a norm counts repeatedly."""
    alternatives = (frozenset(match["axis"] for match in _REPLICAS.finditer(text)) for text in hint.split(", or "))
    return frozenset(filter(None, alternatives))


@dataclass(frozen=True)
class ShrinkResult:
    """The smallest cell and the smallest program that fail in the same way as the original cell.

    ``program`` is None if no program was found, and ``outcome`` is the program's outcome. ``attempts`` is the number of
    cells and programs that were run. ``cell_module_count`` is the number of modules with parameters in the cell's
    model.
    """

    record: Record
    claims: Capabilities
    attempts: int
    cell_module_count: int
    program: Program | None = None
    outcome: ProgramOutcome = PASS_OUTCOME

    @property
    def module_count(self) -> int:
        """Return the number of modules in the program; if there is no program, return ``cell_module_count``."""
        if self.program is None:
            return self.cell_module_count
        return len([x for x in self.program.walk() if x.kind not in SOURCE_KINDS])


class MatchingProgramRunner(ProgramRunner):
    """Runs programs, and reports a failure only if it matches the wanted failure; any other failure counts as a pass.

    Programs that would start after ``deadline`` are not run and count as passed.
    """

    def __init__(self, environment: RankEnvironment, timeout: float) -> None:
        super().__init__(environment, timeout)
        self.deadline = math.inf
        self.wanted_signature = FailureSignature(Verdict.PASS, "")
        self.program_count = 0

    def run(self, engine: str, programs: Sequence[Program], isolation: Isolation = Isolation.POOLED) -> ProgramOutcome:
        """Return the outcome of ``programs``, or a pass if they fail in another way than the wanted failure.

        An error of the harness is always returned.
        """
        if time.monotonic() > self.deadline:
            return PASS_OUTCOME
        # A shortened program may need more features, such as two backwards without a step between them.
        if any(explain_unsupported(program, self.claims(engine, program.stage)) for program in programs):
            return PASS_OUTCOME
        self.program_count += len(programs)
        outcome = super().run(engine, programs, isolation)
        if outcome.verdict is Verdict.ERROR:
            return outcome
        return (
            outcome
            if self.wanted_signature.can_match(extract_failure_signature(outcome.verdict, outcome.cause))
            else PASS_OUTCOME
        )


def shrink_failure(cell: Cell, seed: int, environment: RankEnvironment, timeout: float, seconds: float) -> ShrinkResult:
    """Return the smallest failure of the same kind as that of ``cell`` that is found within ``seconds``.

    The time starts after the first run of ``cell``. Raises UsageError if ``cell`` does not fail.
    """
    programs = MatchingProgramRunner(environment, timeout)
    # Keep the rank pool and the judge: new ones would import the user's model, and transformers, each time.
    isolation = Isolation.POOLED if is_user_model(cell.model) else Isolation.FRESH
    with Runner({cell.engine: environment}, timeout, seed, isolation) as cells, programs:
        first = run_cell(cells, cell)
        if first is None or not first.verdict.is_broken:
            found = "not run" if first is None else f"{first.verdict.value}: {first.cause}"
            raise UsageError(f"{cell.id} does not fail, so there is nothing to shrink: {found}")
        until = time.monotonic() + seconds  # after the first run, which includes the imports
        run = partial(run_cell, cells)
        record, tried = find_smallest_cell(
            first, run, lambda found: iter_candidate_cells(cells, found.cell, until), until
        )
        programs.wanted_signature, programs.deadline = extract_failure_signature(first.verdict, first.cause), until
        claims = cells.claims(record.cell.engine, record.cell.stage)
        # No program contains a user's model or has a mesh, and without these the failure may have another cause.
        needs_cell = is_user_model(record.cell.model) or bool(record.cell.mesh.sizes)
        if needs_cell:  # shrink the law's own program instead
            list_smaller = partial(iter_smaller_programs, claims=claims, salt=seed)
            record, more = find_smallest_cell(record, run, list_smaller, until)
            tried += more - 1
        smallest = ShrinkResult(record, claims, tried, cells.call_in_judge(count_parameter_owners, record.cell.model))
        if record.cell.law.partition(".")[0] not in TRAINING_LAW_GROUPS or needs_cell:
            return smallest
        batch = find_smallest_program(programs, record.cell, seed, claims)
        if len(batch) != 1:
            return replace(smallest, attempts=tried + programs.program_count)
        programs.deadline = time.monotonic() + timeout  # run it once more for its message, even after the time limit
        outcome = programs.run(cell.engine, batch)
        tried += programs.program_count
        if not outcome.verdict.is_broken:  # flaky: a script would not show it
            return replace(smallest, attempts=tried)
        return replace(smallest, attempts=tried, program=batch[0], outcome=outcome)


def run_cell(runner: Runner, cell: Cell) -> Record | None:
    """Run a cell and return its record, or None if the cell is unsupported. Expected failures count as failures."""
    try:
        planned = plan_named_cell(cell, runner.claims)
    except UsageError:
        return None
    return None if planned.unsupported_reason else runner.run(planned)


def find_smallest_cell(
    first: Record,
    run: Callable[[Cell], Record | None],
    list_smaller: Callable[[Record], Iterator[Cell]],
    deadline: float,
) -> tuple[Record, int]:
    """Return the record of the smallest cell that fails in the same way as ``first``, and the number of cells tried.

    ``list_smaller`` yields cells that are smaller than the cell of a record, and ``run`` runs a cell.
    """
    wanted, found, tried = extract_failure_signature(first.verdict, first.cause), first, 1
    seen = {first.cell}
    while True:
        for candidate in list_smaller(found):
            if candidate in seen or time.monotonic() > deadline:
                continue
            seen.add(candidate)
            record = run(candidate)
            tried += 1
            if record is not None and wanted.can_match(extract_failure_signature(record.verdict, record.cause)):
                found = record
                break
        else:
            return found, tried


def iter_candidate_cells(runner: Runner, cell: Cell, deadline: float) -> Iterator[Cell]:
    """Yield cells smaller than ``cell``. For a user's model, also yield cells whose model lacks some modules."""
    has_user_model = is_user_model(cell.model)
    yield from iter_smaller_cells(cell, runner.call_in_judge(smaller_models, cell.model) if has_user_model else ())
    if has_user_model and time.monotonic() < deadline:
        yield from (replace(cell, model=name) for name in runner.call_in_judge(models_without_modules, cell.model))


def iter_smaller_cells(cell: Cell, user_models: Sequence[str] = ()) -> Iterator[Cell]:
    """Yield cells that differ from ``cell`` in one property, such as a smaller model, fewer ranks or a lower stage.

    For each property the smallest value comes first. ``user_models`` are the names of smaller variants of a user's
    model.
    """
    law = get_law(cell.law)
    sizes = {name: count_parameter_owners(name) for name in law.models}
    largest = sizes.get(cell.model, 10**9)
    names = sorted((name for name in sizes if sizes[name] < largest), key=lambda name: sizes[name])
    if is_user_model(cell.model):  # an engine's fault usually shows in any model
        names = names[:MAX_OTHER_MODELS] if cell.variant in law.workload_variants else []
    yield from (replace(cell, model=name) for name in (*names, *user_models))
    yield from (replace(cell, engine_variant=label) for label in smaller_settings(cell.engine_variant))
    yield from iter_smaller_meshes(cell)
    yield from (replace(cell, world_size=size) for size in range(1, cell.world_size))
    if cell.dtype != "fp32":
        yield replace(cell, dtype="fp32")
    yield from (replace(cell, stage=stage) for stage in range(cell.stage))


def iter_smaller_meshes(cell: Cell) -> Iterator[Cell]:
    """Yield cells that lack one axis of the mesh, and cells with a smaller axis, as long as it splits the world."""
    for axis, size in cell.mesh.sizes:
        for smaller in (divisor for divisor in range(1, size) if size % divisor == 0):
            sizes = tuple((name, smaller if name == axis else n) for name, n in cell.mesh.sizes)
            mesh = Mesh(tuple((name, n) for name, n in sizes if n > 1))
            yield replace(cell, mesh=mesh, world_size=cell.world_size * smaller // size)


def iter_smaller_programs(record: Record, claims: Capabilities, salt: int) -> Iterator[Cell]:
    """Yield cells that run a part of the program of a failing cell; yield nothing for a law that runs no program.

    The program of the first cell ends with the call after which the failure was seen.
    """
    cell, form = record.cell, get_law(record.cell.law).programs
    if form is None:
        return
    place = make_program_cell(cell, claims, salt)
    program_text = form.choose(cell.variant, place)
    ended = _PROGRAM_SUFFIX.search(_COORDINATES.sub("", record.cause))
    seen = [ended[2]] if ended and ended[2] != program_text else []
    for program in (*seen, *form.iter_smaller(place, program_text)):
        yield replace(cell, variant=join_variant(place.variant, program))


def smaller_settings(label: str) -> list[str]:
    """Return the labels of settings with fewer parts than the setting ``label``.

    These are the setting without parts, the settings with one part, and the settings that lack one part.
    """
    if not label:
        return []
    parts = label.split(SEPARATOR)
    without_one = (SEPARATOR.join(parts[:at] + parts[at + 1 :]) for at in range(len(parts)))
    return list(dict.fromkeys(("", *(parts if len(parts) > 1 else ()), *without_one)))


def find_smallest_program(runner: MatchingProgramRunner, cell: Cell, salt: int, claims: Capabilities) -> ProgramBatch:
    """Return the smallest program, or batch of programs, that fails in the same way as ``cell``.

    The result is empty if no such program was found.
    """
    for program in law_programs(cell, salt, claims):
        if has_same_failure(runner, cell.engine, (program,)):
            return reduce_batch(runner, cell.engine, (program,))
    for optimizer in ("sgd", "adamw"):
        written = [
            replace(
                parse_program(text), stage=cell.stage, world_size=cell.world_size, dtype=cell.dtype, optimizer=optimizer
            )
            for text in FIRST_PROGRAMS
        ]
        batch = tuple(program for program in written if not explain_unsupported(program, claims))
        if batch and has_same_failure(runner, cell.engine, batch):
            return reduce_batch(runner, cell.engine, batch)
    if time.monotonic() > runner.deadline:
        return ()
    wanted = SearchOptions(
        (cell.stage,), (cell.world_size,), (cell.dtype,), MAX_SEARCH_BATCHES, excluded_names=EXCLUDED_LAYERS
    )
    try:
        drawn: SearchResult = search_programs(runner, cell.engine, wanted)
    except UsageError:  # the engine supports no program, or Hypothesis is not installed
        return ()
    return reduce_ranks(runner, cell.engine, drawn.smallest)


def law_programs(cell: Cell, salt: int, claims: Capabilities) -> Iterator[Program]:
    """Yield two versions of the program that an ``any_order`` law runs in this cell. Yield nothing for other laws.

    The first version has default settings: no gradient clipping, no accumulation and mean reduction. The second version
    has the settings of the law variant.
    """
    template = TEMPLATES_BY_MODEL.get(cell.model, {}).get(cell.variant)
    if template is None or cell.model not in PROGRAM_LAYERS or get_law(cell.law).programs is None:
        return
    layers = tuple(parse_layers(PROGRAM_LAYERS[cell.model]))
    program = template.make_program(cell.seed(salt), cell.dtype, claims)
    program = replace(program, stage=cell.stage, world_size=cell.world_size)
    for candidate in (program.with_default_settings, program):
        yield replace(candidate, layers=layers, verbs=legal_verbs(layers, program.verbs, window=candidate.window))


def has_same_failure(runner: MatchingProgramRunner, engine: str, batch: ProgramBatch) -> bool:
    """Return whether ``batch`` fails in the same way as the failure for which ``runner`` searches."""
    return runner.run(engine, batch).verdict.is_broken


def reduce_batch(runner: MatchingProgramRunner, engine: str, batch: ProgramBatch) -> ProgramBatch:
    """Return a smaller version of the failing ``batch`` that fails in the same way, on as few ranks as possible."""
    return reduce_ranks(
        runner, engine, shrink_batch(batch, lambda smaller: has_same_failure(runner, engine, smaller), NO_LIMITS)
    )


def reduce_ranks(runner: MatchingProgramRunner, engine: str, batch: ProgramBatch) -> ProgramBatch:
    """Return ``batch`` with the smallest number of ranks on which it fails in the same way."""
    if not batch:
        return batch
    for size in range(1, batch[0].world_size):
        fewer = tuple(replace(program, world_size=size) for program in batch)
        if has_same_failure(runner, engine, fewer):
            return fewer
    return batch
