"""Render the long script of a cell or program, which contains the law's own observer and judge and all that they use.

A long script has many times the lines of a short script (``zharness.export.cell_script``). It is needed if the
law records more than values, gradients, weights and optimizer state, or if the plain PyTorch of a short script does not
support the dtype or the options.
"""

from __future__ import annotations

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
from zharness.law_kit.setting import DEFAULT_SETTING, Setting
from zharness.laws import DTYPES, LOSS_SCALES, get_law
from zharness.parity.attribution import attribute_mismatch
from zharness.parity.baseline import Baseline, CastCache
from zharness.parity.contamination import ProcessConditions, read_process_conditions
from zharness.parity.junctions import with_junctions
from zharness.parity.snapshot import EvidenceWriter, RankEvidence
from zharness.run.configuration import cell_setting, load_variant_configuration
from zharness.run.observe_and_judge import choose_cast_cache, engine_options
from zharness.run.program_runner import SEED, program_options
from zharness.workload.program_model import program_model_spec
from zharness.workload.programs import Program
from zharness.workload.user_model import is_user_model

# Names that the part "judge" or the cell's constants define, or that only annotations use.
JUDGE_SCRIPT_NAMES = frozenset(
    {
        "SPEC",
        *(definition.__name__ for definition in (EvidenceWriter, read_process_conditions, attribute_mismatch, Law)),
    }
)
# Names of the cell's constants.
CONSTANT_NAMES = frozenset(
    (
        *(
            "SIGNATURE",
            "OK",
            "SEED",
            "VARIANT",
            "DTYPE",
            "LOSS_SCALE",
            "AUTOCAST",
            "CAST_CACHE",
            "REDUCE_DTYPE",
            "TRAINING",
            "SETTING",
            "CONFIG",
        ),
        *("CLAIMS", "MAKE", "BASELINE_SPEC", "PROGRAM", "NAME", "FACTORY", "observe", "judge", "status"),
    )
)
ROOT_DEFINITIONS = (RankContext, JudgeContext, Baseline, RankEvidence, ProcessConditions, EngineContractError)


RenderText = Callable[[ScriptWriter], str]  # collects the definitions that a text needs, and returns the text


@dataclass(frozen=True)
class JudgeScriptSpec:
    """The description of a long script: its cell or program, and how the result is judged.

    ``model`` renders the text that defines SPEC, and ``baseline_model`` renders an expression for the ModelSpec of the
    plain model. ``observe`` and ``judge`` render expressions for the functions that observe and judge. ``reduce_dtype``
    has the same meaning as in JudgeContext. ``autocast`` is the dtype of ``torch.autocast`` in a user's configuration
    (None: autocast is off). ``cast_cache`` is the CastCache of the plain model.
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
    setting: Setting = DEFAULT_SETTING
    autocast: torch.dtype | None = None
    cast_cache: CastCache = CastCache.ONCE
    reduce_dtype: torch.dtype | None = None


def render_judge_script(script_spec: JudgeScriptSpec, header: ScriptHeader) -> Script:
    """Return the script of ``script_spec``. Raises UsageError for a value that cannot be written as text."""
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
        f"SIGNATURE = {quote(signature)}\nOK = {quote(ok)}\nSEED = {script_spec.seed}",  # a user's model needs the seed
        join_definitions(writing.collection.texts.values()),
        spec,
        constants,
        writing.read_part("judge"),
        writing.read_part("main"),
    ]
    # A built-in adapter imports its engine itself.
    written = engine_name(script_spec.engine) in WRITTEN_ENGINES
    return writing.assemble_script(
        header, sections, lambda used: "" if written else render_prelude(script_spec.engine, used)
    )


def render_judge_constants(writing: ScriptWriter, script_spec: JudgeScriptSpec) -> str:
    """Return the text that defines the script's constants: the cell, its configuration and its engine's claims."""

    def text(value: Any) -> str:
        return render_literal(value, writing.collection, writing.imports)

    lines = [
        f"VARIANT = {quote(script_spec.variant)}",
        f"DTYPE = {text(DTYPES[script_spec.config.dtype])}",
        f"LOSS_SCALE = {text(script_spec.config.loss_scale)}",
        f"AUTOCAST = {text(script_spec.autocast)}  # of the user's configuration",
        f"CAST_CACHE = {text(script_spec.cast_cache)}",
        f"REDUCE_DTYPE = {text(script_spec.reduce_dtype)}  # reduce dtype, if not DTYPE",
        f"TRAINING = {text(script_spec.training)}",
        f"SETTING = {text(script_spec.setting)}",
        f"CONFIG = {text(script_spec.config)}",
        f"CLAIMS = {text(script_spec.claims)}".replace(", Feature.", ",\n    Feature."),
        f"MAKE = {render_factory(writing, script_spec.engine)}",
        f"BASELINE_SPEC = {script_spec.baseline_model(writing)}",
        f"observe = {script_spec.observe(writing)}",
        f"judge = {script_spec.judge(writing)}",
    ]
    return "\n".join(lines)


def build_cell_script_spec(cell: Cell, salt: int, claims: Capabilities, model: RenderText) -> JudgeScriptSpec:
    """Return the description of the long script of a cell.

    ``salt`` is mixed into the hash that gives the cell's seed; ``model`` renders the text that defines SPEC.
    """
    law, configuration, options = (
        get_law(cell.law),
        load_variant_configuration(cell.engine_variant),
        engine_options(cell, claims),
    )
    scale, reduce_dtype = LOSS_SCALES[cell.dtype], claims.reduce_dtypes.get(cell.dtype)
    return JudgeScriptSpec(
        engine=cell.engine,
        claims=claims,
        seed=cell.seed(salt),
        config=EngineConfig(cell.stage, cell.dtype, loss_scale=scale, options=options),
        model=model,
        baseline_model=partial(render_baseline_model, cell, claims),
        observe=partial(render_function, law.observe),
        judge=partial(render_function, law.judge),
        variant=cell.variant,
        training=configuration.training,
        setting=cell_setting(cell.engine_variant),
        autocast=configuration.autocast_dtype,
        cast_cache=choose_cast_cache(cell.stage, claims),
        reduce_dtype=configuration.reduce_dtype
        or configuration.autocast_dtype
        or (None if reduce_dtype is None else DTYPES[reduce_dtype]),
    )


def build_program_script_spec(engine: str, program: Program, claims: Capabilities) -> JudgeScriptSpec:
    """Return the description of a script that runs and judges a program in the same way as the laws ``any_order``."""
    options, claims = program_options(program, claims), claims.with_options(program.options)
    scale, reduce_dtype = LOSS_SCALES[program.dtype], claims.reduce_dtypes.get(program.dtype)

    def render_lambda(function: Callable[..., Any], writing: ScriptWriter) -> str:
        """Return the text of a lambda that calls ``function`` with the context and the program."""
        return f"lambda ctx: {writing.add_definition(function)}(ctx, PROGRAM)"

    def render_model(writing: ScriptWriter) -> str:
        """Return the text that defines PROGRAM and SPEC."""
        called = writing.add_definition(program_model_spec)
        literal = render_literal(program, writing.collection, writing.imports)
        return f"PROGRAM = {literal}\nSPEC = {called}(PROGRAM.layers)"

    return JudgeScriptSpec(
        engine=engine,
        claims=claims,
        seed=SEED,
        config=EngineConfig(program.stage, program.dtype, loss_scale=scale, options=options),
        model=render_model,
        baseline_model=lambda _: "SPEC",
        observe=partial(render_lambda, observe_program),
        judge=partial(render_lambda, judge_program),
        reduce_dtype=None if reduce_dtype is None else DTYPES[reduce_dtype],
    )


def render_factory(writing: ScriptWriter, engine: str) -> str:
    """Return an expression for the engine's factory; the adapter of a built-in engine is collected into the script."""
    if engine_name(engine) not in WRITTEN_ENGINES:
        return factory_expression(engine)
    module, _, factory = registry.require(engine).target.partition(":")
    return writing.collection.add(module, factory)


def render_baseline_model(cell: Cell, claims: Capabilities, writing: ScriptWriter) -> str:
    """Return an expression for the ModelSpec of the plain model; a user's model gets the engine's junctions."""
    if claims.junctions is None or not is_user_model(cell.model):
        return "SPEC"
    called = writing.add_definition(with_junctions)
    return f"{called}(SPEC, {render_literal(claims.junctions, writing.collection, writing.imports)}, CONFIG.options)"


def render_function(law_function: Callable[..., Any], writing: ScriptWriter) -> str:
    """Return an expression for a law's observer or judge.

    The expression is the function's name or, for a nested function, a call of the function that returns it.
    """
    return render_literal(law_function, writing.collection, writing.imports)
