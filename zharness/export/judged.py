"""The script of any cell: the law's own observer and its own judge, written out with all that they use.

It is many times as long as a script whose plain side is told in a few lines (``zharness.export.script``), and is
written where there is no such telling: what the law looks at is more than values, gradients, weights and an optimizer's
state, or the cell's dtype and options ask for more than fp32 arithmetic. Nothing in it is a second version of anything.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from zharness.case import Case
from zharness.checks import DTYPES, LOSS_SCALES, check_named
from zharness.checks.usual import AS_USUAL, Training
from zharness.engines import Capabilities, EngineConfig, registry
from zharness.export.frame import (
    WRITTEN,
    Script,
    Told,
    Writing,
    engine_name,
    joined,
    maker,
    names_of_parts,
    prelude_of,
    quoted,
)
from zharness.export.spelled import spelled
from zharness.run.cell import options_of
from zharness.run.configuration import configured
from zharness.run.programs import SEED
from zharness.workload.foreign import is_foreign
from zharness.workload.programs import Program

# What the part "judged" has of its own, the constants of the cell, and what only annotations name.
GIVEN = frozenset({"Records", "conditions", "attribute", "Check", "SPEC"})
# What the cell's constants are called, beside the names of the parts.
CONSTANTS = frozenset(
    (
        *("SIGNATURE", "OK", "SEED", "VARIANT", "DTYPE", "LOSS_SCALE", "AUTOCAST", "WIRE", "TRAINING", "CONFIG"),
        *("CLAIMS", "MAKE", "BESIDE", "PROGRAM", "NAME", "FACTORY", "observe", "judge", "status"),
    )
)
ROOTS = (
    ("zharness.checks.bench", "Bench"),
    ("zharness.checks.trial", "Trial"),
    ("zharness.parity.baseline", "Baseline"),
    ("zharness.parity.snapshot", "Evidence"),
    ("zharness.parity.contamination", "Conditions"),
    ("zharness.errors", "EngineContractError"),
)


Write = Callable[[Writing], str]  # collects what a text takes, and returns the text


@dataclass(frozen=True)
class Judged:
    """What is run, and what it is held against.

    ``model`` writes what makes SPEC, ``beside`` an expression for the plain model's, ``observe`` and ``judge`` those of
    the functions that do. ``wire`` is as in Trial, ``autocast`` that of a user's configuration.
    """

    engine: str
    claims: Capabilities
    seed: int
    config: EngineConfig
    model: Write
    beside: Write
    observe: Write
    judge: Write
    variant: str = ""
    training: Training = AS_USUAL
    autocast: torch.dtype | None = None
    wire: torch.dtype | None = None


def judged_script(what: Judged, told: Told) -> Script:
    """The script of ``what``. Raises UsageError for what no script can say."""
    _, signature, ok = told
    writing = Writing(what.engine, GIVEN, CONSTANTS | names_of_parts("judged", "main", "foreign") - GIVEN)
    for root in ROOTS:
        writing.collection.add(*root)
    spec = what.model(writing)
    constants = constants_of(writing, what)
    sections = [
        f"SIGNATURE = {quoted(signature)}\nOK = {quoted(ok)}",
        joined(writing.collection.texts.values()),
        spec,
        constants,
        writing.part("judged"),
        writing.part("main"),
    ]
    # The adapter of a written engine imports it by itself.
    written = engine_name(what.engine) in WRITTEN
    return writing.put_together(told, sections, lambda used: "" if written else prelude_of(what.engine, used))


def constants_of(writing: Writing, what: Judged) -> str:
    """What was chosen: the cell, and what its engine claims."""

    def text(value: Any) -> str:
        return spelled(value, writing.collection, writing.imports)

    lines = [
        f"SEED = {what.seed}",
        f"VARIANT = {quoted(what.variant)}",
        f"DTYPE = {text(DTYPES[what.config.dtype])}",
        f"LOSS_SCALE = {text(what.config.loss_scale)}",
        f"AUTOCAST = {text(what.autocast)}  # that of a user's configuration",
        f"WIRE = {text(what.wire)}  # in which gradients are reduced, where that is not DTYPE",
        f"TRAINING = {text(what.training)}",
        f"CONFIG = {text(what.config)}",
        f"CLAIMS = {text(what.claims)}".replace(", Feature.", ",\n    Feature."),
        f"MAKE = {made(writing, what.engine)}",
        f"BESIDE = {what.beside(writing)}",
        f"observe = {what.observe(writing)}",
        f"judge = {what.judge(writing)}",
    ]
    return "\n".join(lines)


def of_cell(case: Case, salt: int, claims: Capabilities, model: Write) -> Judged:
    """The cell of a law; ``salt`` is that of its seed."""
    check, asked, options = check_named(case.check), configured(case.engine_variant), options_of(case, claims)
    scale, wire = LOSS_SCALES[case.dtype], claims.wires.get(case.dtype)
    return Judged(
        engine=case.engine,
        claims=claims,
        seed=case.seed(salt),
        config=EngineConfig(case.stage, case.dtype, loss_scale=scale, options=options),
        model=model,
        beside=partial(beside, case, claims),
        observe=partial(function, check.observe),
        judge=partial(function, check.judge),
        variant=case.variant,
        training=asked.training,
        autocast=asked.autocast,
        wire=asked.wire or asked.autocast or (None if wire is None else DTYPES[wire]),
    )


def of_program(engine: str, program: Program, claims: Capabilities) -> Judged:
    """A program: its verbs are played and judged as those of the laws of any order are."""
    scale, wire = LOSS_SCALES[program.dtype], claims.wires.get(program.dtype)

    def of(name: str, module: str, taken: str, writing: Writing) -> str:
        writing.collection.add(module, name)
        return f"lambda {taken}: {name}({taken}, PROGRAM)"

    def model(writing: Writing) -> str:
        writing.collection.add("zharness.workload.layers", "spec_of")
        return f"PROGRAM = {spelled(program, writing.collection, writing.imports)}\nSPEC = spec_of(PROGRAM.layers)"

    return Judged(
        engine=engine,
        claims=claims,
        seed=SEED,
        config=EngineConfig(program.stage, program.dtype, loss_scale=scale),
        model=model,
        beside=lambda _: "SPEC",
        observe=partial(of, "observe_program", "zharness.checks.program", "bench"),
        judge=partial(of, "judge_program", "zharness.checks.program_judge", "trial"),
        wire=None if wire is None else DTYPES[wire],
    )


def made(writing: Writing, engine: str) -> str:
    """The engine's factory: this package's own around torch's and DeepSpeed's, by its definition."""
    if engine_name(engine) not in WRITTEN:
        return maker(engine)
    module, _, factory = registry.require(engine).target.partition(":")
    return writing.collection.add(module, factory)


def beside(case: Case, claims: Capabilities, writing: Writing) -> str:
    """The plain model of the case; a user's own has the nodes in its graph that the engine puts there."""
    if claims.junctions is None or not is_foreign(case.model):
        return "SPEC"
    called = writing.collection.add("zharness.parity.junctions", "with_junctions")
    return f"{called}(SPEC, {spelled(claims.junctions, writing.collection, writing.imports)}, CONFIG.options)"


def function(one: Callable[..., Any], writing: Writing) -> str:
    """A law's observer or judge: a function of its module, or what a function of it makes of a scene."""
    outer, _, inner = one.__qualname__.partition(".")
    called = writing.collection.add(one.__module__, outer)
    if not inner:
        return called
    held = inspect.getclosurevars(one).nonlocals.values()
    return f"{called}({', '.join(spelled(value, writing.collection, writing.imports) for value in held)})"
