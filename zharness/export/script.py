"""The script of one cell: the model, the engine and the law's steps as text, and plain PyTorch beside them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import partial

from zharness.case import Case
from zharness.checks import DTYPES, check_named
from zharness.checks.play import AFTER, reduced_by
from zharness.engines import AccumulationOwner, Capabilities, Feature, Reduction
from zharness.errors import UsageError
from zharness.export.collect import source
from zharness.export.frame import Script, Setting, Writing, owner_claimed
from zharness.export.header import WRONG, header
from zharness.export.judged import judged_script, of_cell
from zharness.export.laws import OWN, Kind, Steps, steps_of, told_whole
from zharness.parity.certificate import is_power_of_two
from zharness.run.cell import options_of
from zharness.run.configuration import configured
from zharness.run.record import Record, Verdict
from zharness.workload import model_spec
from zharness.workload.foreign import is_foreign, taken_apart


def script_of(record: Record, claims: Capabilities, name: str) -> Script:
    """The script that shows ``record``'s cell, to be saved as ``name``.

    Raises UsageError for a user's own engine, or configuration, of which no script can speak.
    """
    case = record.case
    check = check_named(case.check)
    steps = steps_of(check)
    ok = f"repro: {case.check} on {case.subject} at stage {case.stage} OK."
    if steps is None or whole_cell(case, claims):
        signature = signature_of(record, whole=True)
        told = header(record, check, signature, ok, name, JUDGED), signature, ok
        return judged_script(of_cell(case, record.seed, claims, partial(model_of, case.model)), told)
    signature = signature_of(record)
    writing = Writing(case.engine)
    model = model_of(case.model, writing)
    steps_told = "\n\n\n".join(told_steps(writing, case, steps, claims))
    setting = setting_of(case, record.seed, steps, claims)
    if setting.joined:
        writing.collection.add("zharness.parity.junctions", "joined")
    head = header(record, check, signature, ok, name, ITSELF if check.name in OWN else BESIDE)
    return writing.script(head, setting, model, steps_told, signature, ok, steps.beside)


def whole_cell(case: Case, claims: Capabilities) -> bool:
    """Whether the script of ``case`` has its law's own judge, for a short script's plain side does less.

    That runs in fp32 and not under autocast, and the bound is that of an fp32 wire: with others a right engine would be
    told to be wrong.
    """
    options, facts = options_of(case, claims), configured(case.engine_variant)
    if told_whole(check_named(case.check), case.dtype, case.engine):
        return True
    if facts.autocast is not None or facts.wire is not None or options.get("torch_autocast"):
        return True
    return joined(case, claims) and case.engine.partition("==")[0] != "fsdp2"


def model_of(name: str, writing: Writing) -> str:
    """The text that makes SPEC."""
    return foreign_model(writing, name) if is_foreign(name) else own_model(writing, name)


def joined(case: Case, claims: Capabilities) -> bool:
    """Whether the plain model has the engine's nodes in its graph."""
    return claims.junctions is not None and is_foreign(case.model)


def setting_of(case: Case, salt: int, steps: Steps, claims: Capabilities) -> Setting:
    """The constants of a cell's script."""
    zeros = claims.refusal(Feature.NO_GRADIENT) is not None
    if steps.scene is not None:
        zeros = zeros and steps.scene.unused.name == "CLAIMED"
    return Setting(
        engine=case.engine,
        stage=case.stage,
        seed=case.seed(salt),
        claims=claims,
        exact=exactly(case, steps, claims),
        zeros=zeros,
        elements=sum(p.numel() for p in model_spec(case.model).model(case.seed(salt)).parameters()),
        variant=case.variant,
        options=options_of(case, claims),
        training=repr(configured(case.engine_variant).training),
        named=case.dtype,
        dtype=DTYPES[case.dtype],
        wire=DTYPES[claims.wires.get(case.dtype, case.dtype)],
        joined=joined(case, claims),
    )


BESIDE = "The same steps are made on the engine and on plain PyTorch, and compared."
ITSELF = "What the engine does is held against its own numbers."
JUDGED = (
    "Below are the law's own observer and judge, and the engine's adapter, with all that they use; the cell comes last."
)
EXPECTED = "ULP apart"  # part of what the harness says of every mismatch


def signature_of(record: Record, whole: bool = False) -> str:
    """A part of what the script says where it shows the cell: the exception's own words, or what is wrong, by its name.

    Where the cell names nothing, as one that breaks the protocol does, any wrong number shows it; but a script that is
    ``whole`` has the law's judge, and says what that raises.
    """
    raised = re.search(r"raised: (.*)", record.cause, re.DOTALL)
    wrong = record.divergence
    if raised is not None and (record.verdict is Verdict.CRASH or (whole and wrong is None)):
        words = " ".join(raised[1].split())
        stem = re.split(r"(?<=.{24})[\d(<;\[]|0x", words)[0] if len(words) > 24 else words
        return re.split(r'["\\]', stem[:70])[0].strip() or words.partition(":")[0]
    if wrong is None:
        return EXPECTED if whole else WRONG
    # Not with the part of the step: to tell that is left out of a script.
    return f": {wrong.parameter}{'[' if wrong.index else ' ('}" if whole else wrong.parameter


def own_model(writing: Writing, name: str) -> str:
    """The model, its batches and its loss, as the registry's own entry has them."""
    module = "zharness.workload.models"
    writing.collection.add(module, "ModelSpec")
    writing.collection.add(module, "SAMPLES")
    registry_ = source(module).definitions["MODELS"]
    for node in ast.walk(registry_):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ModelSpec":
            fields = {keyword.arg: keyword.value for keyword in node.keywords}
            if getattr(fields["name"], "value", "") == name:
                return dedented(f"SPEC = {writing.collection.expression(module, node)}")
    raise UsageError.unknown("model to export", name, ())


def foreign_model(writing: Writing, name: str) -> str:
    """A user's own model, which the script imports."""
    for module, needed in (("models", "ModelSpec"), ("models", "SAMPLES"), ("drawing", "drawn_from")):
        writing.collection.add(f"zharness.workload.{module}", needed)
    path, changes = taken_apart(name)
    module, _, factory = path.partition(":")
    text = writing.part("foreign")
    found = f'importlib.import_module("{module}").{factory}'
    if changes:
        writing.collection.add("zharness.workload.reduced", "reduced")
        text = f"def smaller(factory):\n    return reduced(factory(), {changes!r})\n\n\n{text}".replace(
            "FACTORY()", "smaller(FACTORY)"
        )
    return f'sys.path.insert(0, os.getcwd())\nNAME, FACTORY = "{name}", {found}\n\n\n{text}'


def told_steps(writing: Writing, case: Case, steps: Steps, claims: Capabilities) -> Iterator[str]:
    """What the caller does."""
    function = steps.function
    writing.collection.add(function.__module__, function.__name__)
    if steps.kind in (Kind.STEPS, Kind.OWN):
        yield f"observe = {function.__name__}"
        return
    writing.collection.add("zharness.checks.accumulation", "FROZEN")
    if steps.kind is Kind.TRANSFORM:
        writing.collection.add("zharness.checks.torch_func", "placed")
        writing.collection.add("zharness.checks.torch_func", "placed_as")
        owned = owner_claimed(AccumulationOwner.ENGINE, claims)
        yield f"ACCUMULATIONS = {(1, 4) if owned else (1,)}\nTRANSFORM = {function.__name__}"
        yield writing.part("transforms")
        return
    assert steps.scene is not None, "a play has a scene"
    scene = steps.scene
    owned = scene.accumulation > 1 and owner_claimed(AccumulationOwner.ENGINE, claims)
    reduction = reduced_by(scene.reduction, case.world_size, claims)
    yield "\n".join(
        [
            f"PLAY, ENGINES, AFTER = {function.__name__}, {scene.engines}, {AFTER}",
            f"DIVISOR, REDUCTION = {scene.accumulation if owned else 1}, Reduction.{reduction.name}",
        ]
    )
    yield writing.part("plays")


# They divide by three, and their later steps begin at weights that are no integers any more.
ROUNDED = ("training.accumulation",)


def exactly(case: Case, steps: Steps, claims: Capabilities) -> bool:
    """Whether the script compares bitwise: a sum of integers is exact, a mean where it divides by a power of two."""
    scene = steps.scene
    if scene and reduced_by(scene.reduction, case.world_size, claims) is Reduction.SUM and case.dtype == "fp32":
        return True
    exact = model_spec(case.model).exact and check_named(case.check).integral and case.check not in ROUNDED
    return case.dtype == "fp32" and exact and is_power_of_two(case.world_size)


def dedented(text: str) -> str:
    """A call whose lines were further in."""
    lines = text.splitlines()
    margin = len(lines[-1]) - len(lines[-1].lstrip())
    return "\n".join([lines[0], *(line[margin:] for line in lines[1:])])
