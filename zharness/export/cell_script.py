"""Render the script of one cell: its model, engine and law, judged by plain PyTorch or by the law's own judge."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from zharness.cell import Cell
from zharness.engines import AccumulationOwner, Capabilities, Feature, Reduction
from zharness.errors import UsageError
from zharness.export.header import WRONG_NUMBER_PHRASE, render_cell_docstring
from zharness.export.judge_script import build_cell_script_spec, render_judge_script
from zharness.export.literals import render_literal
from zharness.export.script_length import explain_long_script, is_self_comparison
from zharness.export.script_writer import (
    MESH_ENGINES,
    Script,
    ScriptSettings,
    ScriptWriter,
    engine_name,
    is_owner_claimed,
)
from zharness.law_kit.law_steps import LawSteps, StepsKind
from zharness.law_kit.scenarios import FOLLOW_UP_MICRO, UnusedGrads, choose_exact_reduction, make_scenario_observer
from zharness.law_kit.setting import DEFAULT_SETTING
from zharness.laws import DTYPES, get_law
from zharness.laws.torch_func import align_weights, measure_weight_alignment
from zharness.mesh import TENSOR
from zharness.parity.certificate import is_power_of_two
from zharness.parity.junctions import insert_junction
from zharness.run.configuration import cell_setting, load_variant_configuration, translate_configuration
from zharness.run.observe_and_judge import engine_options
from zharness.run.record import Record, Verdict
from zharness.workload import ModelSpec, model_spec, models
from zharness.workload.shrink_model import shrink_factory_result
from zharness.workload.transformers_batches import find_draw
from zharness.workload.user_model import is_user_model, parse_user_model_name


def render_cell_script(record: Record, claims: Capabilities, name: str) -> Script:
    """Return the script that reproduces the verdict of ``record``; ``name`` is the script's file name in its docstring.

    Raises UsageError if the cell's engine, mesh or configuration cannot be written as a script.
    """
    cell = record.cell
    law = get_law(cell.law)
    steps = law.steps
    if cell.mesh.sizes and is_judged_by_law(cell, claims):
        raise UsageError(f"got {cell.id}, {UNJUDGED_MESH}; expected `zharness export` without --standalone and --form")
    ok = f"repro: {cell.law} on {cell.engine_label} at stage {cell.stage} OK."
    if steps is None or is_judged_by_law(cell, claims):
        signature = extract_signature(record, is_judged=True)
        header = render_cell_docstring(record, law, signature, ok, name, JUDGE_EXPLANATION), signature, ok
        return render_judge_script(
            build_cell_script_spec(cell, record.seed, claims, partial(render_model, cell.model)), header
        )
    signature = extract_signature(record)
    writing = ScriptWriter(cell.engine)
    model = render_model(cell.model, writing)
    observe_text = "\n\n\n".join(render_steps(writing, cell, steps, claims))
    setting = build_settings(cell, record.seed, steps, claims)
    if setting.has_junctions:
        writing.add_definition(insert_junction)
    head = render_cell_docstring(
        record, law, signature, ok, name, SELF_EXPLANATION if is_self_comparison(steps) else PLAIN_EXPLANATION
    )
    return writing.render_script(head, setting, model, observe_text, signature, ok, steps.comparison_part)


def explain_unwritable_mesh(cell: Cell) -> str:
    """Return the reason why a script without zharness cannot run ``cell`` on its mesh; "" if it can or has no mesh.

    On tp the engine splits the model and plain PyTorch does not, so that they round differently, unless the cell rounds
    no number.
    """
    if not cell.mesh.sizes:
        return ""
    if engine_name(cell.engine) not in MESH_ENGINES or cell.mesh.axes != (TENSOR,):
        return "whose mesh a script without zharness cannot build"
    if get_law(cell.law).steps is None:
        return UNJUDGED_MESH
    if is_user_model(cell.model) or not model_spec(cell.model).exact or cell.dtype != "fp32":
        return "on whose mesh a script without zharness cannot bound rounding"
    return ""


def is_judged_by_law(cell: Cell, claims: Capabilities) -> bool:
    """Return whether the script has to contain the law's own judge, because comparing with plain PyTorch is not enough.

    A short script runs plain PyTorch in fp32 or bf16 without autocast, and bounds a reduction in the cell's dtype.
    Under other settings it would reject an engine that is right.
    """
    options, facts = engine_options(cell, claims), translate_configuration(cell.engine, cell.engine_variant)
    if replace(cell_setting(cell.engine_variant), options=()) != DEFAULT_SETTING:
        return True
    if explain_long_script(get_law(cell.law), cell.dtype, cell.engine):
        return True
    if facts.autocast_dtype is not None or facts.reduce_dtype is not None or options.get("torch_autocast"):
        return True
    return has_junctions(cell, claims) and cell.engine.partition("==")[0] != "fsdp2"


def render_model(name: str, writing: ScriptWriter) -> str:
    """Return the text that defines the constant SPEC of the script, which is the ModelSpec of the model ``name``."""
    return render_user_model(writing, name) if is_user_model(name) else render_registered_model(writing, name)


def has_junctions(cell: Cell, claims: Capabilities) -> bool:
    """Return whether the plain model needs junctions, the autograd nodes that the engine adds around modules."""
    return claims.junctions is not None and is_user_model(cell.model)


def build_settings(cell: Cell, salt: int, steps: LawSteps, claims: Capabilities) -> ScriptSettings:
    """Return the constants of a cell's script; ``salt`` is mixed into the hash that gives the cell's seed."""
    zeros = claims.refusal(Feature.NO_GRADIENT) is not None
    if steps.scenario is not None:
        zeros = zeros and steps.scenario.unused_grads is UnusedGrads.NONE_IF_CLAIMED
    return ScriptSettings(
        engine=cell.engine,
        stage=cell.stage,
        seed=cell.seed(salt),
        claims=claims,
        exact=is_compared_bitwise(cell, steps, claims),
        zeros_allowed=zeros,
        element_count=sum(p.numel() for p in model_spec(cell.model).model(cell.seed(salt)).parameters()),
        variant=cell.variant,
        options=engine_options(cell, claims),
        training=repr(load_variant_configuration(cell.engine_variant).training),
        dtype_name=cell.dtype,
        dtype=DTYPES[cell.dtype],
        reduce_dtype=DTYPES[claims.reduce_dtypes.get(cell.dtype, cell.dtype)],
        has_junctions=has_junctions(cell, claims),
        tensor_ranks=cell.mesh.size(TENSOR),
        tp_plan=model_spec(cell.model).tp_plan,
    )


PLAIN_EXPLANATION = "The script runs the same steps on the engine and on plain PyTorch, and compares the results."
SELF_EXPLANATION = "The script compares the engine with its own numbers."
JUDGE_EXPLANATION = (
    "Below are the law's own observer and judge, and the engine's adapter, with all that they use; the cell comes last."
)
UNJUDGED_MESH = "whose law a script without zharness cannot judge on a mesh"
MISMATCH_PHRASE = "elements wrong)"  # part of every Mismatch.describe()


def extract_signature(record: Record, is_judged: bool = False) -> str:
    """Return the text in the script's output that identifies the failure: an exception's message or a tensor's name.

    If the record has neither, for example because the engine breaks the protocol, the signature matches any wrong
    number. With ``is_judged``, the script contains the law's own judge, and an exception that the judge raises is also
    a signature.
    """
    raised = re.search(r"raised: (.*)", record.cause, re.DOTALL)
    wrong = record.divergence
    if raised is not None and (record.verdict is Verdict.CRASH or (is_judged and wrong is None)):
        message = " ".join(raised[1].split())
        stem = re.split(r"(?<=.{24})[\d(<;\[]|0x", message)[0] if len(message) > 24 else message
        return re.split(r'["\\]', stem[:70])[0].strip() or message.partition(":")[0]
    if wrong is None:
        return MISMATCH_PHRASE if is_judged else WRONG_NUMBER_PHRASE
    # The part of the step is left out, because a script does not attribute a mismatch to a part.
    return f": {wrong.parameter}{'[' if wrong.index else ' ('}" if is_judged else wrong.parameter


def render_registered_model(writing: ScriptWriter, name: str) -> str:
    """Return the definition of SPEC for a model of this package, including its batches and its loss."""
    writing.collection.add(models.__name__, "SAMPLES")
    return f"SPEC = {render_literal(model_spec(name), writing.collection, writing.imports)}"


def render_user_model(writing: ScriptWriter, name: str) -> str:
    """Return the definition of SPEC for a user's model, which the script imports from the user's module."""
    writing.collection.add(models.__name__, "SAMPLES")
    for used in (ModelSpec, find_draw):
        writing.add_definition(used)
    path, changes = parse_user_model_name(name)
    module, _, factory = path.partition(":")
    text = writing.read_part("user_model")
    factory_text = f'importlib.import_module("{module}").{factory}'
    if changes:
        called = writing.add_definition(shrink_factory_result)
        factory_text = f"lambda: {called}({factory_text}(), {changes!r})"
    return f'sys.path.insert(0, os.getcwd())\nNAME, FACTORY = "{name}", {factory_text}\n\n\n{text}'


def render_steps(writing: ScriptWriter, cell: Cell, steps: LawSteps, claims: Capabilities) -> Iterator[str]:
    """Yield the parts of the script that define the steps of the law."""
    function = steps.function
    writing.add_definition(function)
    if steps.kind in (StepsKind.OBSERVER, StepsKind.SELF_COMPARISON):
        yield f"observe = {function.__name__}"
        return
    writing.collection.add(make_scenario_observer.__module__, "ZERO_LR_SGD")
    if steps.kind is StepsKind.TRANSFORM:
        for used in (measure_weight_alignment, align_weights):
            writing.add_definition(used)
        owned = is_owner_claimed(AccumulationOwner.ENGINE, claims)
        yield f"ACCUMULATIONS = {(1, 4) if owned else (1,)}\nTRANSFORM = {function.__name__}"
        yield writing.read_part("transforms")
        return
    assert steps.scenario is not None, "scenario laws have a scenario"
    scenario = steps.scenario
    owned = scenario.accumulation_steps > 1 and is_owner_claimed(AccumulationOwner.ENGINE, claims)
    reduction = choose_exact_reduction(scenario.reduction, count_batches(cell), claims)
    yield "\n".join(
        [
            f"SCRIPT, ENGINES, FOLLOW_UP = {function.__name__}, {scenario.engine_count}, {FOLLOW_UP_MICRO}",
            f"DIVISOR, REDUCTION = {scenario.accumulation_steps if owned else 1}, Reduction.{reduction.name}",
            f"TENSOR_BACKWARD = {claims.refusal(Feature.TENSOR_BACKWARD) is None}",
        ]
    )
    yield writing.read_part("scenarios")


def is_compared_bitwise(cell: Cell, steps: LawSteps, claims: Capabilities) -> bool:
    """Return whether the script demands bitwise equality, because no number in the cell is rounded.

    Sums of integers are exact, and their mean is exact if the number of ranks is a power of two.
    """
    scenario = steps.scenario
    if (
        scenario
        and choose_exact_reduction(scenario.reduction, count_batches(cell), claims) is Reduction.SUM
        and cell.dtype == "fp32"
    ):
        return True
    exact = model_spec(cell.model).exact and get_law(cell.law).weights_stay_integers and not steps.rounds
    return cell.dtype == "fp32" and exact and is_power_of_two(count_batches(cell))


def count_batches(cell: Cell) -> int:
    """Return the number of different micro-batches of a step, which is the number of ranks without a mesh."""
    return cell.mesh.data_size(cell.world_size)
