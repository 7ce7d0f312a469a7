"""The smallest that still fails in the same way: a cell on fewer ranks with a smaller model, and a small program."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zharness.case import Case
from zharness.checks import check_named
from zharness.checks.program import missing
from zharness.checks.repertoires import BY_MODEL
from zharness.checks.trajectory import STALE
from zharness.engines import Capabilities
from zharness.errors import UsageError
from zharness.export.smaller import models_without_modules, owners_of_parameters, smaller_models
from zharness.run.plan import named
from zharness.run.programs import Outcome, ProgramRunner
from zharness.run.record import Record, Verdict
from zharness.run.runner import Runner
from zharness.run.search import PASSED, Found, Search, search, shrunk
from zharness.workload.foreign import is_foreign
from zharness.workload.legal import NO_LIMITS, Batch, legal_verbs
from zharness.workload.program_text import parse, parse_layers
from zharness.workload.programs import SOURCES, Program
from zharness.world import Isolation
from zharness.world.server import Surroundings

# Laws of what a program does too: the others are of saved state, of bytes, of casts.
TRAINING = ("training", "backward", "double_backward", "torch_func", "checkpointing", "parameters", "model")
# Tried before any is drawn: most that is wrong with an engine shows in one of these.
LADDER = (
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
# Engines have rules of their own for parameters that a loss does not use, and break by them in ways that look alike.
WITHOUT = ("unused", "sometimes")
LAYERED = {  # models of layers like those of the laws of any order
    "mlp": "x(3) linear(4) gelu linear(2)",
    "changing": "x(3) linear(3) frozen(3) sometimes[linear(3)] unused(2) read(2)",
}
OTHERS = 1  # of the workload's models, tried in place of a user's own
BATCHES = 40  # of programs that Hypothesis draws, where none of these fails; the time is over before


@dataclass(frozen=True)
class Likeness:
    """By what two failures are one: the verdict, the part of the step that went wrong or the exception raised, and

    what the wrong numbers look like or the exception says, numbers and names in it left out.
    """

    verdict: Verdict
    word: str
    said: str = ""

    def alike(self, other: Likeness) -> bool:
        """Whether ``other`` may be the same failure; where nothing was said of this one, anything may be said of it."""
        return (self.verdict, self.word) == (other.verdict, other.word) and self.said in ("", other.said)


_SO_FAR = re.compile(r"(; )?at the end of '[^']*'$")  # the verbs of a law's own program
# A number, a name with dots or digits in it, and what is quoted: they are another model's.
_OWN = re.compile(r"'[^']*'|\"[^\"]*\"|[\w.]*\d[\w.+]*|\w+(?:\.\w+)+")


def likeness(verdict: Verdict, cause: str) -> Likeness:
    """What a failure's cause says of it."""
    part = re.match(r"step \d+, ([a-z ]+):", cause)
    if part:
        hint = _SO_FAR.sub("", cause.rpartition("); ")[2]) if "); " in cause else ""
        if hint.startswith(STALE):  # wherever it is looked at, it shows in what a forward computes
            return Likeness(verdict, STALE)
        # Of one element that is wrong among several, nothing is left in a model of one element.
        return Likeness(verdict, part[1], "" if hint.startswith("only ") else _OWN.sub("#", hint))
    raised = re.search(r"raised: (\w+)(?:: ([^\n]*))?", cause)
    return Likeness(verdict, raised[1], _OWN.sub("#", raised[2] or "")) if raised else Likeness(verdict, "")


@dataclass(frozen=True)
class Smallest:
    """The smallest cell that fails alike, and the smallest program where there is one; ``tried`` cells and programs.

    ``modules_of_cell`` own parameters in the cell's model.
    """

    record: Record
    claims: Capabilities
    tried: int
    modules_of_cell: int
    program: Program | None = None
    outcome: Outcome = PASSED

    @property
    def modules(self) -> int:
        """How many modules the program has, or own parameters in the cell's model where there is no program."""
        if self.program is None:
            return self.modules_of_cell
        return len([x for x in self.program.walk() if x.kind not in SOURCES])


class Alike(ProgramRunner):
    """Programs that fail otherwise pass here, and all do when the time is over."""

    def __init__(self, place: Surroundings, timeout: float) -> None:
        super().__init__(place, timeout)
        self.until = math.inf
        self.wanted = Likeness(Verdict.PASS, "")
        self.runs = 0

    def run(self, engine: str, programs: Sequence[Program]) -> Outcome:
        """What became of ``programs``, or a pass."""
        if time.monotonic() > self.until:
            return PASSED
        # A cut may leave what needs more of an engine than the whole did, as two backwards without a step between.
        if any(missing(program, self.claims(engine, program.stage)) for program in programs):
            return PASSED
        self.runs += len(programs)
        outcome = super().run(engine, programs)
        if outcome.verdict is Verdict.ERROR:
            return outcome
        return outcome if self.wanted.alike(likeness(outcome.verdict, outcome.cause)) else PASSED


def shrink(case: Case, seed: int, place: Surroundings, timeout: float, seconds: float) -> Smallest:
    """The smallest that fails as ``case`` does, as far as it is found within ``seconds`` after it was seen to fail.

    Raises UsageError for a cell that does not fail.
    """
    programs = Alike(place, timeout)
    # Ranks and a judge that live on: new ones would import the module of a user's model, and transformers, each time.
    isolation = Isolation.POOLED if is_foreign(case.model) else Isolation.FRESH
    with Runner({case.engine: place}, timeout, seed, isolation) as cells, programs:
        first = run_cell(cells, case)
        if first is None or not first.verdict.broken:
            found = "not run" if first is None else f"{first.verdict.value}: {first.cause}"
            raise UsageError(f"{case.id} does not fail, so there is nothing to shrink: {found}")
        until = time.monotonic() + seconds  # the first run has imported what all others take
        record, tried = smallest_cell(cells, first, until)
        programs.wanted, programs.until = likeness(first.verdict, first.cause), until
        claims = cells.claims(record.case.engine, record.case.stage)
        smallest = Smallest(record, claims, tried, cells.ask(owners_of_parameters, record.case.model))
        # What no model of the workload shows comes with the user's own, and no program has that.
        if record.case.check.partition(".")[0] not in TRAINING or is_foreign(record.case.model):
            return smallest
        batch = smallest_program(programs, record.case, seed, claims)
        if len(batch) != 1:
            return replace(smallest, tried=tried + programs.runs)
        programs.until = time.monotonic() + timeout  # once more, for its words, also where the time is over
        outcome = programs.run(case.engine, batch)
        tried += programs.runs
        if not outcome.verdict.broken:  # it failed once: a script of it would show nothing
            return replace(smallest, tried=tried)
        return replace(smallest, tried=tried, program=batch[0], outcome=outcome)


def run_cell(runner: Runner, case: Case) -> Record | None:
    """The record of a cell; None for one that is not run. An excuse changes no verdict."""
    try:
        planned = named(case, runner.claims)
    except UsageError:
        return None
    return None if planned.unsupported else runner.run(planned)


def smallest_cell(runner: Runner, first: Record, until: float) -> tuple[Record, int]:
    """The smallest cell that fails as ``first`` does, and how many were tried."""
    wanted, found, tried = likeness(first.verdict, first.cause), first, 1
    seen = {first.case}
    while True:
        for case in candidates(runner, found.case, until):
            if case in seen or time.monotonic() > until:
                continue
            seen.add(case)
            record = run_cell(runner, case)
            tried += 1
            if record is not None and wanted.alike(likeness(record.verdict, record.cause)):
                found = record
                break
        else:
            return found, tried


def candidates(runner: Runner, case: Case, until: float) -> Iterator[Case]:
    """Smaller cells; where a user's own model gets no smaller in any other way, those without modules of it."""
    own = is_foreign(case.model)
    yield from smaller_cells(case, runner.ask(smaller_models, case.model) if own else ())
    if own and time.monotonic() < until:
        yield from (replace(case, model=name) for name in runner.ask(models_without_modules, case.model))


def smaller_cells(case: Case, own: Sequence[str] = ()) -> Iterator[Case]:
    """Cells that are smaller in one axis, those that are much smaller first; ``own`` are of a model of the user's."""
    check = check_named(case.check)
    sizes = {name: owners_of_parameters(name) for name in check.models}
    largest = sizes.get(case.model, 10**9)
    names = sorted((name for name in sizes if sizes[name] < largest), key=lambda name: sizes[name])
    if is_foreign(case.model):  # what is the engine's fault shows in any model, what is the model's in none of these
        names = names[:OTHERS] if case.variant in [name for name, _ in check.variants] else []
    yield from (replace(case, model=name) for name in (*names, *own))
    if case.engine_variant:
        yield replace(case, engine_variant="")
    yield from (replace(case, world_size=size) for size in range(1, case.world_size))
    if case.dtype != "fp32":
        yield replace(case, dtype="fp32")
    yield from (replace(case, stage=stage) for stage in range(case.stage))


def smallest_program(runner: Alike, case: Case, salt: int, claims: Capabilities) -> Batch:
    """The smallest program that fails alike where ``case`` does, alone or behind others; empty where none was found."""
    for program in own_programs(case, salt, claims):
        if fails(runner, case.engine, (program,)):
            return cut_down(runner, case.engine, (program,))
    for optimizer in ("sgd", "adamw"):
        written = [
            replace(parse(text), stage=case.stage, world_size=case.world_size, dtype=case.dtype, optimizer=optimizer)
            for text in LADDER
        ]
        batch = tuple(program for program in written if not missing(program, claims))
        if batch and fails(runner, case.engine, batch):
            return cut_down(runner, case.engine, batch)
    if time.monotonic() > runner.until:
        return ()
    wanted = Search((case.stage,), (case.world_size,), (case.dtype,), BATCHES, without=WITHOUT)
    try:
        drawn: Found = search(runner, case.engine, wanted)
    except UsageError:  # the engine claims nothing that a program takes, or Hypothesis is not there
        return ()
    return less(runner, case.engine, drawn.smallest)


def own_programs(case: Case, salt: int, claims: Capabilities) -> Iterator[Program]:
    """What the case's law of any order has its caller say, of a model of layers, plainly configured and as it is there.

    Nothing for another law.
    """
    repertoire = BY_MODEL.get(case.model, {}).get(case.variant)
    if repertoire is None or not check_named(case.check).by_verb:
        return
    layers = tuple(parse_layers(LAYERED[case.model]))
    spoken = repertoire.program(case.seed(salt), case.dtype, claims)
    spoken = replace(spoken, stage=case.stage, world_size=case.world_size)
    for one in (spoken.plainly, spoken):
        yield replace(one, layers=layers, verbs=legal_verbs(layers, spoken.verbs, window=one.window))


def fails(runner: Alike, engine: str, batch: Batch) -> bool:
    """Whether ``batch`` fails alike."""
    return runner.run(engine, batch).verdict.broken


def cut_down(runner: Alike, engine: str, batch: Batch) -> Batch:
    """What is left of a failing ``batch``, on the fewest ranks."""
    return less(runner, engine, shrunk(batch, lambda some: fails(runner, engine, some), NO_LIMITS))


def less(runner: Alike, engine: str, batch: Batch) -> Batch:
    """The same on the fewest ranks on which it fails so too."""
    if not batch:
        return batch
    for size in range(1, batch[0].world_size):
        fewer = tuple(replace(program, world_size=size) for program in batch)
        if fails(runner, engine, fewer):
            return fewer
    return batch
