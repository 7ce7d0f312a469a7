"""The script of any cell: the law's own observer and its own judge, written out with all that they use.

It is many times as long as a script whose plain side is told in a few lines (``zharness.export.cell_script``), and is
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

from zharness.cell import Cell
from zharness.engines import Capabilities, EngineConfig, registry
from zharness.errors import EngineContractError
from zharness.export.literals import render_literal
from zharness.export.script_writer import (
    WRITTEN_ENGINES,
    Script,
    ScriptHeader,
    ScriptWriter,
    engine_name,
    factory_expression,
    join_definitions,
    names_defined_in_parts,
    quote,
    render_prelude,
)
from zharness.law_kit.default_training import DEFAULT_TRAINING, TrainingConfig
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law
from zharness.law_kit.program_executor import observe_program
from zharness.law_kit.program_judge import judge_program
from zharness.law_kit.rank_context import RankContext
from zharness.laws import DTYPES, LOSS_SCALES, get_law
from zharness.parity.attribution import attribute_mismatch
from zharness.parity.baseline import Baseline
from zharness.parity.contamination import ProcessConditions, read_process_conditions
from zharness.parity.junctions import with_junctions
from zharness.parity.snapshot import EvidenceWriter, RankEvidence
from zharness.run.configuration import configuration_for
from zharness.run.observe_and_judge import engine_options
from zharness.run.program_runner import SEED
from zharness.workload.program_model import program_model_spec
from zharness.workload.programs import Program
from zharness.workload.user_model import is_user_model

# What the part "judged" has of its own, the constants of the cell, and what only annotations name.
JUDGE_SCRIPT_NAMES = frozenset(
    {"SPEC", *(each.__name__ for each in (EvidenceWriter, read_process_conditions, attribute_mismatch, Law))}
)
# What the cell's constants are called, beside the names of the parts.
CONSTANT_NAMES = frozenset(
    (
        *("SIGNATURE", "OK", "SEED", "VARIANT", "DTYPE", "LOSS_SCALE", "AUTOCAST", "WIRE", "TRAINING", "CONFIG"),
        *("CLAIMS", "MAKE", "BESIDE", "PROGRAM", "NAME", "FACTORY", "observe", "judge", "status"),
    )
)
ROOT_DEFINITIONS = (RankContext, JudgeContext, Baseline, RankEvidence, ProcessConditions, EngineContractError)


RenderText = Callable[[ScriptWriter], str]  # collects what a text takes, and returns the text


@dataclass(frozen=True)
class JudgeScriptSpec:
    """What is run, and what it is held against.

    ``model`` writes what makes SPEC, ``beside`` an expression for the plain model's, ``observe`` and ``judge`` those of
    the functions that do. ``wire`` is as in Trial, ``autocast`` that of a user's configuration.
    """

    engine: str
    claims: Capabilities
    seed: int
    config: EngineConfig
    model: RenderText
    baseline_model: RenderText
    observe: RenderText
    judge: RenderText
    variant: str = ""
    training: TrainingConfig = DEFAULT_TRAINING
    autocast: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


def render_judge_script(script_spec: JudgeScriptSpec, header: ScriptHeader) -> Script:
    """The script of ``what``. Raises UsageError for what no script can say."""
    _, signature, ok = header
    writing = ScriptWriter(
        script_spec.engine,
        JUDGE_SCRIPT_NAMES,
        CONSTANT_NAMES | names_defined_in_parts("judge", "main", "user_model") - JUDGE_SCRIPT_NAMES,
    )
    for root in ROOT_DEFINITIONS:
        writing.add_definition(root)
    spec = script_spec.model(writing)
    constants = render_judge_constants(writing, script_spec)
    sections = [
        f"SIGNATURE = {quote(signature)}\nOK = {quote(ok)}",
        join_definitions(writing.collection.texts.values()),
        spec,
        constants,
        writing.read_part("judge"),
        writing.read_part("main"),
    ]
    # The adapter of a written engine imports it by itself.
    written = engine_name(script_spec.engine) in WRITTEN_ENGINES
    return writing.assemble_script(
        header, sections, lambda used: "" if written else render_prelude(script_spec.engine, used)
    )


def render_judge_constants(writing: ScriptWriter, script_spec: JudgeScriptSpec) -> str:
    """What was chosen: the cell, and what its engine claims."""

    def text(value: Any) -> str:
        return render_literal(value, writing.collection, writing.imports)

    lines = [
        f"SEED = {script_spec.seed}",
        f"VARIANT = {quote(script_spec.variant)}",
        f"DTYPE = {text(DTYPES[script_spec.config.dtype])}",
        f"LOSS_SCALE = {text(script_spec.config.loss_scale)}",
        f"AUTOCAST = {text(script_spec.autocast)}  # that of a user's configuration",
        f"WIRE = {text(script_spec.reduce_dtype)}  # in which gradients are reduced, where that is not DTYPE",
        f"TRAINING = {text(script_spec.training)}",
        f"CONFIG = {text(script_spec.config)}",
        f"CLAIMS = {text(script_spec.claims)}".replace(", Feature.", ",\n    Feature."),
        f"MAKE = {render_factory(writing, script_spec.engine)}",
        f"BESIDE = {script_spec.baseline_model(writing)}",
        f"observe = {script_spec.observe(writing)}",
        f"judge = {script_spec.judge(writing)}",
    ]
    return "\n".join(lines)


def build_cell_script_spec(cell: Cell, salt: int, claims: Capabilities, model: RenderText) -> JudgeScriptSpec:
    """The cell of a law; ``salt`` is that of its seed."""
    check, asked, options = get_law(cell.law), configuration_for(cell.engine_variant), engine_options(cell, claims)
    scale, wire = LOSS_SCALES[cell.dtype], claims.wires.get(cell.dtype)
    return JudgeScriptSpec(
        engine=cell.engine,
        claims=claims,
        seed=cell.seed(salt),
        config=EngineConfig(cell.stage, cell.dtype, loss_scale=scale, options=options),
        model=model,
        baseline_model=partial(render_baseline_model, cell, claims),
        observe=partial(render_function, check.observe),
        judge=partial(render_function, check.judge),
        variant=cell.variant,
        training=asked.training,
        autocast=asked.autocast_dtype,
        reduce_dtype=asked.reduce_dtype or asked.autocast_dtype or (None if wire is None else DTYPES[wire]),
    )


def build_program_script_spec(engine: str, program: Program, claims: Capabilities) -> JudgeScriptSpec:
    """A program: its verbs are played and judged as those of the laws of any order are."""
    scale, wire = LOSS_SCALES[program.dtype], claims.wires.get(program.dtype)

    def render_lambda(function: Callable[..., Any], writing: ScriptWriter) -> str:
        return f"lambda ctx: {writing.add_definition(function)}(ctx, PROGRAM)"

    def model(writing: ScriptWriter) -> str:
        called = writing.add_definition(program_model_spec)
        literal = render_literal(program, writing.collection, writing.imports)
        return f"PROGRAM = {literal}\nSPEC = {called}(PROGRAM.layers)"

    return JudgeScriptSpec(
        engine=engine,
        claims=claims,
        seed=SEED,
        config=EngineConfig(program.stage, program.dtype, loss_scale=scale),
        model=model,
        baseline_model=lambda _: "SPEC",
        observe=partial(render_lambda, observe_program),
        judge=partial(render_lambda, judge_program),
        reduce_dtype=None if wire is None else DTYPES[wire],
    )


def render_factory(writing: ScriptWriter, engine: str) -> str:
    """The engine's factory: this package's own around torch's and DeepSpeed's, by its definition."""
    if engine_name(engine) not in WRITTEN_ENGINES:
        return factory_expression(engine)
    module, _, factory = registry.require(engine).target.partition(":")
    return writing.collection.add(module, factory)


def render_baseline_model(cell: Cell, claims: Capabilities, writing: ScriptWriter) -> str:
    """The plain model of the case; a user's own has the nodes in its graph that the engine puts there."""
    if claims.junctions is None or not is_user_model(cell.model):
        return "SPEC"
    called = writing.add_definition(with_junctions)
    return f"{called}(SPEC, {render_literal(claims.junctions, writing.collection, writing.imports)}, CONFIG.options)"


def render_function(law_function: Callable[..., Any], writing: ScriptWriter) -> str:
    """A law's observer or judge: a function of its module, or what a function of it makes of a scene."""
    outer, _, inner = law_function.__qualname__.partition(".")
    called = writing.collection.add(law_function.__module__, outer)
    if not inner:
        return called
    held = inspect.getclosurevars(law_function).nonlocals.values()
    return f"{called}({', '.join(render_literal(value, writing.collection, writing.imports) for value in held)})"
