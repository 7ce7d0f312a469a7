"""The script of one cell: the model, the engine and the law's steps as text, and plain PyTorch beside them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from zharness import engines
from zharness.case import Case
from zharness.checks import check_named
from zharness.checks.play import AFTER
from zharness.engines import AccumulationOwner, Capabilities, Feature, Reduction, registry
from zharness.errors import UsageError
from zharness.export.collect import Collection, source
from zharness.export.header import header
from zharness.export.laws import Kind, Steps, reason_against, steps_of
from zharness.export.text import import_block, names_in, parts_of, pruned
from zharness.parity.certificate import is_power_of_two
from zharness.run.record import Record, Verdict
from zharness.workload import model_spec

PARTS = Path(__file__).parent / "parts"
WRITTEN = ("ddp", "zero1", "fsdp2", "deepspeed")  # engines whose set-up is a part of its own
PROTOCOL = "zharness.engines.protocol"
# What scripts have of their own, by the names that checks know it by.
GIVEN = frozenset({"Bench", "Side", "Check", "Trial", "Feature", "Observe", "Scene", "SPEC"})
INSTEAD = {
    "DTensor": "from torch.distributed.tensor import DTensor",
    # Of older torch alone it says more than torch's own.
    "_mse": "from torch.nn.functional import mse_loss as _mse",
}
ALWAYS = ("import os", "import sys", "import importlib", "from torch import nn", "import torch")
OWN_CLASSES = ("Engine", "EngineConfig", "OptimizerSpec", "GroupSpec", "AccumulationOwner", "Reduction")
STEPPING = ("record_trained", "record_weights", "record_state", "full_params", "full_optimizer_state")
PRELUDES = {
    "deepspeed": """LINEAR = nn.functional.linear
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))  # DeepSpeed's CPU accelerator asks for it

import deepspeed
{utilities}

# Saves compiling an all-reduce in shared memory, for which the ranks would race; plain gloo does as well.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None""",
}


@dataclass(frozen=True)
class Script:
    """The text, the line it ends with where the law holds, and what it says where it does not."""

    text: str
    signature: str
    ok: str


def script_of(record: Record, claims: Capabilities, name: str) -> Script:
    """The script that shows ``record``'s cell, to be saved as ``name``.

    Raises UsageError where there is none for its law, its dtype or its engine yet.
    """
    case = record.case
    check = check_named(case.check)
    steps = steps_of(check)
    reason = reason_against(check, case.dtype)
    if reason or steps is None:
        raise UsageError(f"cannot export {case.id}: {reason}; `zharness export --list` says which laws can be")
    signature, ok = signature_of(record), f"repro: {case.check} on {case.subject} at stage {case.stage} OK."
    outside = engine_name(case) not in WRITTEN
    writing = Writing(Collection(GIVEN if outside else GIVEN | {"Engine"}, instead(outside)))
    body = "\n\n\n".join(writing.sections(case, record.seed, steps, claims, signature, ok))
    body = pruned(body)
    used = names_in(ast.parse(body))
    prelude = prelude_of(case, used)
    statements = [*writing.collection.imports.values(), *writing.imports, *ALWAYS]
    block = import_block(statements, used | names_in(ast.parse(prelude)))
    text = "\n\n".join(part for part in (header(record, check, signature, ok, name), block, prelude) if part)
    return Script(spaced(f"{text}\n\n{body}\n"), signature, ok)


def prelude_of(case: Case, used: frozenset[str]) -> str:
    """What stands between the imports and the script's own: how its engine is imported."""
    name = engine_name(case)
    if name in WRITTEN:
        utilities = [f"from deepspeed.utils import {each}" for each in sorted(used) if each.startswith("safe_")]
        return PRELUDES.get(name, "").replace("{utilities}", import_block(utilities, used)).replace("\n\n\n", "\n\n")
    module, _, factory = engines.require(case.engine).target.partition(":")
    found = "sys.path.insert(0, os.getcwd())\n\n" if registry.is_path(case.engine) else ""
    return f"{found}from {module} import {factory}"


def maker(case: Case) -> str:
    """What makes an engine of a model and a configuration, by its name in the script."""
    return "Engine" if engine_name(case) in WRITTEN else engines.require(case.engine).target.partition(":")[2]


def engine_name(case: Case) -> str:
    """The engine without its release."""
    return registry.split(case.engine)[0]


def instead(outside: bool) -> Mapping[str, str]:
    """Imports in place of definitions; an engine that is not written out takes the harness's own configuration."""
    own = {name: f"from zharness.engines import {name}" for name in OWN_CLASSES}
    return {**INSTEAD, **(own if outside else {})}


def signature_of(record: Record) -> str:
    """A part of what the script says where it shows the cell: the exception's own words, or that a number is wrong."""
    raised = re.search(r"raised: (.*)", record.cause, re.DOTALL)
    if record.verdict is Verdict.CRASH and raised is not None:
        words = " ".join(raised[1].split())
        stem = re.split(r"(?<=.{24})[\d(<;\[]|0x", words)[0] if len(words) > 24 else words
        return stem[:70].strip().replace("\\", "").replace('"', "'") if "'" not in stem else stem[:70].strip()
    return "plain PyTorch gives"


@dataclass
class Writing:
    """Sections of one script, and the imports that its parts bring."""

    collection: Collection
    imports: list[str]

    def __init__(self, collection: Collection) -> None:
        self.collection = collection
        self.imports = []

    def sections(
        self, case: Case, salt: int, steps: Steps, claims: Capabilities, signature: str, ok: str
    ) -> Iterator[str]:
        """The script's text, section by section."""
        model = self.model(case.model)
        for name in OWN_CLASSES:
            self.collection.add(PROTOCOL, name)
        told = "\n\n\n".join(self.steps(case, steps, claims))
        asked = "\n".join(self.collection.texts.values())
        stepping = any(f".{word}(" in asked for word in STEPPING)
        sums = ["gamma", "subnormal"]
        for name in sums:
            self.collection.add("zharness.parity.bounds", name)
        formulas = self.formulas(asked) if stepping else ""
        definitions = joined(self.collection.texts.values())
        yield f"SIGNATURE = {quoted(signature)}\nOK = {quoted(ok)}"
        yield definitions
        yield from filter(None, (formulas, model))
        yield self.part("optimizers")
        yield self.part(f"engine_{engine_name(case)}" if engine_name(case) in WRITTEN else "engine_outside")
        yield self.constants(case, salt, claims, steps)
        yield self.part("plain")
        if stepping:
            yield self.part("stepping")
        yield self.part("bench")
        yield told
        yield self.part("compare")
        yield self.part("main")

    def model(self, name: str) -> str:
        """The model, its batches and its loss, as the registry's own entry has them."""
        module = "zharness.workload.models"
        self.collection.add(module, "ModelSpec")
        self.collection.add(module, "SAMPLES")
        registry_ = source(module).definitions["MODELS"]
        for node in ast.walk(registry_):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ModelSpec":
                fields = {keyword.arg: keyword.value for keyword in node.keywords}
                if getattr(fields["name"], "value", "") == name:
                    return dedented(f"SPEC = {self.collection.expression(module, node)}")
        raise UsageError.unknown("model to export", name, ())

    def constants(self, case: Case, salt: int, claims: Capabilities, steps: Steps) -> str:
        """What the cell chose."""
        options = dict(claims.variants[case.engine_variant]) if case.engine_variant else {}
        exact = exactly(case, steps, claims)
        zeros = claims.refusal(Feature.NO_GRADIENT) is not None
        if steps.scene is not None:
            zeros = zeros and steps.scene.unused.name == "CLAIMED"
        elements = sum(p.numel() for p in model_spec(case.model).model(0).parameters())
        owners = [owner for owner in AccumulationOwner if owner_claimed(owner, claims)]
        self.imports += ["from types import SimpleNamespace", "import torch"]
        kernels, variants = dict(claims.own_kernels), {key: dict(value) for key, value in claims.variants.items()}
        lines = [
            f"SEED = {case.seed(salt)}",
            f"VARIANT = {quoted(case.variant)}",
            "DTYPE = torch.float32",
            "WIRE = torch.float32  # in which gradients are reduced",
            f"EXACT = {exact}  # integers over powers of two: no sum of them is rounded, in any order",
            f"ZEROS_WILL_DO = {zeros}",
            f"ELEMENTS = {elements}",
            f"OWNERS = [{', '.join(f'AccumulationOwner.{owner.name}' for owner in sorted(owners, key=by_name))}]",
            f"CLAIMS = SimpleNamespace(own_kernels={kernels!r}, variants={variants!r})",
            f"MAKE = {maker(case)}",
            f"CONFIG = EngineConfig(stage={case.stage}, micro_batch_size=SAMPLES, options={options!r})",
        ]
        return "\n".join(lines)

    def steps(self, case: Case, steps: Steps, claims: Capabilities) -> Iterator[str]:
        """What the caller does."""
        function = steps.function
        self.collection.add(function.__module__, function.__name__)
        if steps.kind is Kind.STEPS:
            yield f"observe = {function.__name__}"
            return
        self.collection.add("zharness.checks.accumulation", "FROZEN")
        if steps.kind is Kind.TRANSFORM:
            self.collection.add("zharness.checks.torch_func", "placed")
            self.collection.add("zharness.checks.torch_func", "placed_as")
            owned = owner_claimed(AccumulationOwner.ENGINE, claims)
            yield f"ACCUMULATIONS = {(1, 4) if owned else (1,)}\nTRANSFORM = {function.__name__}"
            yield self.part("transforms")
            return
        assert steps.scene is not None, "a play has a scene"
        scene = steps.scene
        owned = scene.accumulation > 1 and owner_claimed(AccumulationOwner.ENGINE, claims)
        wanted = scene.reduction if is_power_of_two(case.world_size) else Reduction.SUM
        reduction = wanted if claims.refusal(Feature.SUM) is None else Reduction.MEAN
        yield "\n".join(
            [
                f"PLAY, ENGINES, AFTER = {function.__name__}, {scene.engines}, {AFTER}",
                f"DIVISOR, REDUCTION = {scene.accumulation if owned else 1}, Reduction.{reduction.name}",
            ]
        )
        yield self.part("plays")

    def formulas(self, asked: str) -> str:
        """The formulas of the optimizers that the steps name, with the options that are added to each."""
        named = {node.value for node in ast.walk(ast.parse(asked)) if isinstance(node, ast.Constant)}
        self.collection.add("zharness.parity.bounds", "Bounded")
        self.collection.add("zharness.checks.optimizer_step", "hyper")
        module, found = "zharness.parity.formulas", []
        table = source(module).definitions["FORMULAS"]
        assert isinstance(table, ast.AnnAssign), "a dictionary with its type"
        assert isinstance(table.value, ast.Dict), "a dictionary"
        for key, value in zip(table.value.keys, table.value.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str) and key.value in named:
                found.append(f'"{key.value}": {self.collection.expression(module, value)}')
        return f"FORMULAS = {{{', '.join(found)}}}"

    def part(self, name: str) -> str:
        """A part of the script that is the same for many cells."""
        imports, text = parts_of((PARTS / f"{name}.py.txt").read_text(encoding="utf-8"))
        self.imports += imports
        return text


def quoted(text: str) -> str:
    """A Python string in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def by_name(owner: AccumulationOwner) -> str:
    """The caller first: the last one that an engine claims is the one that is asked for."""
    return owner.name


def owner_claimed(owner: AccumulationOwner, claims: Capabilities) -> bool:
    """Whether an engine claims that ``owner`` may own the accumulation."""
    feature = Feature.ENGINE_ACCUMULATION if owner is AccumulationOwner.ENGINE else Feature.CALLER_ACCUMULATION
    return claims.refusal(feature) is None


def exactly(case: Case, steps: Steps, claims: Capabilities) -> bool:
    """Whether the script compares bitwise: a sum of integers is exact, a mean where it divides by a power of two."""
    if steps.scene is not None and steps.scene.reduction is Reduction.SUM and claims.refusal(Feature.SUM) is None:
        return True
    return model_spec(case.model).exact and is_power_of_two(case.world_size)


def dedented(text: str) -> str:
    """A call whose lines were further in."""
    lines = text.splitlines()
    margin = len(lines[-1]) - len(lines[-1].lstrip())
    return "\n".join([lines[0], *(line[margin:] for line in lines[1:])])


def joined(texts: Iterable[str]) -> str:
    """Definitions one after the other; constants of one line stand together."""
    found = ""
    for text in texts:
        lone = "\n" not in text and not text.startswith(("def ", "class "))
        found += ("\n" if found and lone and is_lone(found) else "\n\n\n" if found else "") + text
    return found


def is_lone(text: str) -> bool:
    """Whether the last line of ``text`` is a constant's."""
    last = text.splitlines()[-1]
    return bool(last) and not last[0].isspace() and last[0] not in ")]}" and " = " in last


def spaced(text: str) -> str:
    """Two empty lines before each definition at the top, one inside a class; none more."""
    text = re.sub(r"\n{4,}", "\n\n\n", text)
    return re.sub(r"\n{3,}(?= )", "\n\n", text)
