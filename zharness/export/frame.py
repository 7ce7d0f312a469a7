"""What all scripts have: how the engine is set up, plain PyTorch beside it, the comparison, imports and constants."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zharness import engines
from zharness.engines import AccumulationOwner, Capabilities, Feature, registry
from zharness.export.collect import Collection, defined, source
from zharness.export.text import import_block, names_in, parts_of, pruned

PARTS = Path(__file__).parent / "parts"
WRITTEN = ("ddp", "zero1", "fsdp2", "deepspeed")  # engines whose set-up is a part of its own
PROTOCOL = "zharness.engines.protocol"
# What scripts have of their own, by the names that checks know it by.
GIVEN = frozenset({"Bench", "Side", "Check", "Trial", "Feature", "Observe", "Scene", "SPEC"})
INSTEAD = {
    # Of older torch alone it says more than torch's own.
    "_mse": "from torch.nn.functional import mse_loss as _mse",
}
ALWAYS = ("import os", "import sys", "import importlib", "from torch import nn", "import torch")
OWN_CLASSES = ("Absent", "Engine", "EngineConfig", "OptimizerSpec", "GroupSpec", "AccumulationOwner", "Reduction")
# What an engine of somebody else is written with: a script has it from this package, as the engine does.
PROTOCOL_CLASSES = ("Capabilities", "EngineFactory", "Feature", "Observations", "Piece", "Resources", "Traffic")
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


Told = tuple[str, str, str]  # the docstring, the signature, and the line that a script ends with where nothing is wrong


@dataclass(frozen=True)
class Script:
    """The text, a part of what it says where it shows its cell, and the line it ends with where it does not."""

    text: str
    signature: str
    ok: str


@dataclass(frozen=True)
class Setting:
    """What a script's constants say: where it runs, and how its numbers are compared.

    ``exact``: bitwise. ``zeros``: whether zeros will do where plain PyTorch has no gradient. ``elements`` are those of
    all parameters together. ``named`` is the case's dtype, ``dtype`` and ``wire`` are torch's. ``joined``: plain
    PyTorch has nodes in its graph where the engine has them.
    """

    engine: str
    stage: int
    seed: int
    claims: Capabilities
    exact: bool
    zeros: bool
    elements: int
    variant: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    training: str = ""
    named: str = "fp32"
    dtype: torch.dtype = torch.float32
    wire: torch.dtype = torch.float32
    joined: bool = False


def prelude_of(engine: str, used: frozenset[str]) -> str:
    """What stands between the imports and the script's own: how its engine is imported."""
    name = engine_name(engine)
    if name in WRITTEN:
        utilities = [f"from deepspeed.utils import {each}" for each in sorted(used) if each.startswith("safe_")]
        return PRELUDES.get(name, "").replace("{utilities}", import_block(utilities, used)).replace("\n\n\n", "\n\n")
    return "sys.path.insert(0, os.getcwd())" if registry.is_path(engine) else ""


def maker(engine: str) -> str:
    """What makes an engine of a model and a configuration, by its name in the script."""
    if engine_name(engine) in WRITTEN:
        return "Engine"
    module, _, factory = engines.require(engine).target.partition(":")
    # Not by a name of its own, which the script may give to something else.
    return f"importlib.import_module({quoted(module)}).{factory}"


def engine_name(engine: str) -> str:
    """The engine without its release."""
    return registry.split(engine)[0]


def instead(outside: bool) -> Mapping[str, str]:
    """Imports in place of definitions; an engine that is not written out takes the harness's own configuration."""
    own = {name: f"from zharness.engines import {name}" for name in (*OWN_CLASSES, *PROTOCOL_CLASSES)}
    return {**INSTEAD, **(own if outside else {})}


class Writing:
    """One script as it grows: definitions collected, and the imports that its parts bring."""

    def __init__(self, engine: str, given: frozenset[str] | None = None, taken: frozenset[str] = frozenset()) -> None:
        """``given`` and ``taken`` as in Collection; None: what a script with a plain side has of its own."""
        outside = engine_name(engine) not in WRITTEN
        own = given if given is not None else GIVEN if outside else GIVEN | {"Engine"}
        self.collection = Collection(own, instead(outside), taken)
        self.imports: list[str] = []
        for name in OWN_CLASSES:
            self.collection.add(PROTOCOL, name)

    def script(
        self, head: str, setting: Setting, model: str, told: str, signature: str, ok: str, beside: str = "beside"
    ) -> Script:
        """The whole: ``head`` is its docstring, ``model`` makes SPEC, ``told`` is the function observe.

        ``beside`` is the part that tells what the engine is held against.
        """
        asked = "\n".join((*self.collection.texts.values(), told, setting.training))
        if ".training" in asked:  # of the bench, or of a module: names are all that decides what is kept
            self.collection.add("zharness.checks.usual", "Training")
        plain = beside == "beside"
        stepping = plain and any(f".{word}(" in asked for word in STEPPING)
        for name in ("gamma", "subnormal"):
            self.collection.add("zharness.parity.bounds", name)
        formulas = self.formulas(asked) if stepping else ""
        engine = engine_name(setting.engine)
        sections = [
            f"SIGNATURE = {quoted(signature)}\nOK = {quoted(ok)}",
            joined(self.collection.texts.values()),
            formulas,
            self.part("optimizers"),
            self.part(f"engine_{engine}" if engine in WRITTEN else "engine_outside"),
            self.constants(setting, asked),
            model,
            self.part("plain") if plain else "",
            self.part("stepping") if stepping else "",
            self.part("junctions") if plain and setting.joined else "",
            self.part("bench"),
            told,
            self.part(beside),
            self.part("compare"),
            self.part("main"),
        ]
        return self.put_together((head, signature, ok), sections, partial(prelude_of, setting.engine))

    def put_together(self, told: Told, sections: Iterable[str], prelude_of: Callable[[frozenset[str]], str]) -> Script:
        """The script of ``sections``, without what nothing in them uses; ``prelude_of`` is told the names that are."""
        head, signature, ok = told
        body = pruned("\n\n\n".join(filter(None, sections)))
        used = names_in(ast.parse(body))
        prelude = prelude_of(used)
        statements = [*self.collection.imports.values(), *self.imports, *ALWAYS]
        block = import_block(statements, used | names_in(ast.parse(prelude)))
        text = "\n\n".join(part for part in (head, block, prelude) if part)
        return Script(spaced(f"{text}\n\n{body}\n"), signature, ok)

    def constants(self, setting: Setting, asked: str) -> str:
        """What was chosen; of what the engine claims, what the text ``asked`` looks at."""
        claims = setting.claims
        features = [Feature[name] for name in sorted(set(re.findall(r"\bFeature\.(\w+)", asked)))]
        refused = {each.name: claims.refusal(each) for each in features if claims.refusal(each) is not None}
        owners = [owner for owner in AccumulationOwner if owner_claimed(owner, claims)]
        self.imports += ["from types import SimpleNamespace", "import torch"]
        kernels, variants = dict(claims.own_kernels), {key: dict(value) for key, value in claims.variants.items()}
        config = [f"stage={setting.stage}", *([f'dtype="{setting.named}"'] if setting.named != "fp32" else [])]
        lines = [
            f"SEED = {setting.seed}",
            f"VARIANT = {quoted(setting.variant)}",
            f"DTYPE = {setting.dtype}",
            f"WIRE = {setting.wire}  # in which gradients are reduced",
            f"EXACT = {setting.exact}  # True where no sum is rounded, in any order: integers over powers of two",
            f"ZEROS_WILL_DO = {setting.zeros}",
            f"ELEMENTS = {setting.elements}",
            f"OWNERS = [{', '.join(f'AccumulationOwner.{owner.name}' for owner in sorted(owners, key=by_name))}]",
            f"Feature = SimpleNamespace({', '.join(f'{each.name}={each.name!r}' for each in features)})",
            f"CLAIMS = SimpleNamespace(own_kernels={kernels!r}, variants={variants!r}, refusal={refused!r}.get)",
            f"TRAINING = {setting.training or None}",
            f"MAKE = {maker(setting.engine)}",
            f"OPTIONS = {dict(setting.options)!r}",
            f"CONFIG = EngineConfig({', '.join(config)}, micro_batch_size=SAMPLES, options=OPTIONS)",
        ]
        return "\n".join(lines)

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


def names_of_parts(*names: str) -> frozenset[str]:
    """What these parts of a script define."""
    texts = [(PARTS / f"{name}.py.txt").read_text(encoding="utf-8") for name in names]
    return frozenset(name for text in texts for statement in ast.parse(text).body for name in defined(statement))


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
