"""Assemble a script: definitions, imports, constants, the engine's adapter, plain PyTorch and the comparison."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zharness import engines
from zharness.engines import AccumulationOwner, Capabilities, Engine, Feature, registry
from zharness.engines.tensor_parallel import make_style
from zharness.errors import UsageError
from zharness.export.collect import DefinitionCollection, defined_names, read_source
from zharness.export.scopes import find_global_reads
from zharness.export.source_text import prune_unused, render_imports, split_imports
from zharness.law_kit.default_training import TrainingConfig
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law
from zharness.law_kit.optimizer_step import step_hyperparameters
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.scenarios import Participant, Scenario
from zharness.parity import formulas
from zharness.parity.bounds import BoundedTensor, gamma, subnormal

PARTS_FOLDER = Path(__file__).parent / "parts"
PLAIN_COMPARISON_PART = "compare_with_plain"  # the part that runs the same steps on plain PyTorch
WRITTEN_ENGINES = ("ddp", "zero1", "fsdp2", "torch_tp", "deepspeed")  # engines with a part engine_NAME.py.txt
MESH_ENGINES = ("fsdp2", "torch_tp")  # written engines whose part takes the data-parallel ranks from the mesh part
PROTOCOL_MODULE = "zharness.engines.protocol"
# Names that laws use and that the fixed parts of a short script define.
PLAIN_SCRIPT_NAMES = frozenset(
    {"SPEC", *(definition.__name__ for definition in (RankContext, Participant, Law, JudgeContext, Feature, Scenario))}
)
IMPORT_OVERRIDES = {
    # The original only adds a workaround for older torch.
    "_mse": "from torch.nn.functional import mse_loss as _mse",
}
BASE_IMPORTS = ("import os", "import sys", "import importlib", "from torch import nn", "import torch")
CONFIG_CLASSES = ("Absent", "Engine", "EngineConfig", "OptimizerSpec", "GroupSpec", "AccumulationOwner", "Reduction")
# Classes that an engine outside this package uses: the script imports them from zharness, as the engine itself does.
PROTOCOL_CLASSES = ("Capabilities", "EngineFactory", "Feature", "Observations", "Piece", "Resources", "Traffic")
STEP_STATE_METHODS = tuple(
    method.__name__
    for method in (
        *(RankContext.record_training_state, RankContext.record_weights, RankContext.record_optimizer_state),
        *(Engine.full_params, Engine.full_optimizer_state),
    )
)
PRELUDES = {
    "deepspeed": """LINEAR = nn.functional.linear
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))  # DeepSpeed's CPU accelerator asks for it

import deepspeed
{utilities}

# Saves compiling an all-reduce in shared memory, for which the ranks would race; plain gloo does as well.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None""",
}


ScriptHeader = tuple[str, str, str]  # docstring, signature, and the line that a script prints for success


@dataclass(frozen=True)
class Script:
    """The text of a script, the signature of the failure, and the line that the script prints if the law holds.

    ``signature`` is the text in the script's output that identifies the failure.
    """

    text: str
    signature: str
    success_line: str


@dataclass(frozen=True)
class ScriptSettings:
    """The constants of a script that repeats one cell: engine, seed and settings, and how its numbers are compared.

    With ``exact``, numbers have to be bitwise equal. With ``zeros_allowed``, a gradient of zeros passes where ``.grad``
    is None in plain PyTorch. ``element_count`` is the number of elements of all parameters. ``dtype_name`` is the
    cell's dtype as text; ``dtype`` and ``reduce_dtype`` are torch dtypes. With ``has_junctions``, the plain model gets
    junctions, the autograd nodes that the engine adds around modules. ``tensor_ranks`` is the size of the axis tp, over
    which ``tp_plan`` splits modules.
    """

    engine: str
    stage: int
    seed: int
    claims: Capabilities
    exact: bool
    zeros_allowed: bool
    element_count: int
    variant: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    training: str = ""
    dtype_name: str = "fp32"
    dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    has_junctions: bool = False
    tensor_ranks: int = 1
    tp_plan: Mapping[str, str] = field(default_factory=dict)


def render_prelude(engine: str, used_names: frozenset[str]) -> str:
    """Return the text between the script's imports and its definitions, which sets up and imports the engine."""
    name = engine_name(engine)
    if name in WRITTEN_ENGINES:
        utilities = [f"from deepspeed.utils import {used}" for used in sorted(used_names) if used.startswith("safe_")]
        return (
            PRELUDES.get(name, "")
            .replace("{utilities}", render_imports(utilities, used_names))
            .replace("\n\n\n", "\n\n")
        )
    return "sys.path.insert(0, os.getcwd())" if registry.is_factory_path(engine) else ""


def factory_expression(engine: str) -> str:
    """Return the expression that a short script uses for the engine's factory."""
    if engine_name(engine) in WRITTEN_ENGINES:
        return "Engine"
    module, _, factory = engines.require(engine).target.partition(":")
    # An imported name might clash with a definition of the script.
    return f"importlib.import_module({quote(module)}).{factory}"


def engine_name(engine: str) -> str:
    """Return the name of an engine without its release."""
    return registry.split_release(engine)[0]


def get_import_overrides(is_imported_engine: bool) -> Mapping[str, str]:
    """Return the imports that replace definitions, by the name of the definition.

    If the script imports its engine, the classes of the engine protocol are imported as well.
    """
    protocol_imports = {name: f"from zharness.engines import {name}" for name in (*CONFIG_CLASSES, *PROTOCOL_CLASSES)}
    return {**IMPORT_OVERRIDES, **(protocol_imports if is_imported_engine else {})}


class ScriptWriter:
    """Collects the definitions and imports of one script, and assembles the script."""

    def __init__(
        self, engine: str, provided: frozenset[str] | None = None, reserved: frozenset[str] = frozenset()
    ) -> None:
        """Start an empty script for ``engine``.

        ``provided`` and ``reserved`` have the same meaning as in DefinitionCollection. If ``provided`` is None, the
        names that the fixed parts of a short script define are provided.
        """
        outside = engine_name(engine) not in WRITTEN_ENGINES
        names = provided if provided is not None else PLAIN_SCRIPT_NAMES if outside else PLAIN_SCRIPT_NAMES | {"Engine"}
        self.collection = DefinitionCollection(names, get_import_overrides(outside), reserved)
        self.imports: list[str] = []
        for name in CONFIG_CLASSES:
            self.collection.add(PROTOCOL_MODULE, name)

    def add_definition(self, definition: type | Callable[..., Any]) -> str:
        """Collect a class or function of this package and all that it uses; return its name in the script."""
        return self.collection.add(definition.__module__, definition.__name__)

    def render_script(
        self,
        docstring: str,
        settings: ScriptSettings,
        model: str,
        observe_text: str,
        signature: str,
        success_line: str,
        comparison_part: str = PLAIN_COMPARISON_PART,
    ) -> Script:
        """Assemble a short script.

        ``model`` is the text that defines SPEC, and ``observe_text`` is the text that defines the function ``observe``.
        ``comparison_part`` is the name of the fixed part that computes the expected values.
        """
        used_text = "\n".join((*self.collection.texts.values(), observe_text, settings.training))
        if ".training" in used_text:  # an attribute of RankContext or of a module
            self.add_definition(TrainingConfig)
        plain = comparison_part == PLAIN_COMPARISON_PART
        stepping = plain and any(f".{word}(" in used_text for word in STEP_STATE_METHODS)
        for bound in (gamma, subnormal):
            self.add_definition(bound)
        formulas = self.render_formulas(used_text) if stepping else ""
        engine, on_mesh = engine_name(settings.engine), settings.tensor_ranks > 1
        sections = [
            f"SIGNATURE = {quote(signature)}\nOK = {quote(success_line)}",
            join_definitions(self.collection.texts.values()),
            formulas,
            self.read_part("optimizers"),
            self.read_part("tensor_mesh" if on_mesh else "data_mesh") if engine in MESH_ENGINES else "",
            self.read_part(f"engine_{engine}" if engine in WRITTEN_ENGINES else "engine_imported"),
            self.render_constants(settings, used_text),
            self.render_styles(settings) if on_mesh else "",
            model,
            self.read_part("plain") if plain else "",
            self.read_part("stepping") if stepping else "",
            self.read_part("junctions") if plain and settings.has_junctions else "",
            self.read_part("tensor_plain") if plain and on_mesh else "",
            self.read_part("rank_context"),
            self.read_part("tensor_ranks") if on_mesh else "",
            observe_text,
            self.read_part(comparison_part),
            self.read_part("compare"),
            self.read_part("main"),
        ]
        return self.assemble_script(
            (docstring, signature, success_line), sections, partial(render_prelude, settings.engine)
        )

    def assemble_script(
        self, header: ScriptHeader, sections: Iterable[str], make_prelude: Callable[[frozenset[str]], str]
    ) -> Script:
        """Assemble a script from ``sections``, without the definitions that nothing uses.

        ``make_prelude(names)`` returns the text that imports the engine; ``names`` are the names that the sections
        read.
        """
        head, signature, ok = header
        body = prune_unused("\n\n\n".join(filter(None, sections)))
        used = find_global_reads(body)
        prelude = make_prelude(used)
        statements = [*self.collection.imports.values(), *self.imports, *BASE_IMPORTS]
        block = render_imports(statements, used | find_global_reads(prelude))
        text = "\n\n".join(part for part in (head, block, prelude) if part)
        return Script(normalize_blank_lines(f"{text}\n\n{body}\n"), signature, ok)

    def render_constants(self, settings: ScriptSettings, used_text: str) -> str:
        """Return the text that defines the constants, including those claims of the engine that ``used_text`` reads."""
        claims = settings.claims
        features = [Feature[name] for name in sorted(set(re.findall(r"\bFeature\.(\w+)", used_text)))]
        refused = {feature.name: claims.refusal(feature) for feature in features if claims.refusal(feature) is not None}
        owners = [owner for owner in AccumulationOwner if is_owner_claimed(owner, claims)]
        self.imports += ["from types import SimpleNamespace", "import torch"]
        kernels, options = dict(claims.own_kernels), dict(claims.neutral_options)
        pairs = sorted(map(sorted, claims.neutral_exclusions))  # in an order that is the same in every process
        exclusions = f"[frozenset(pair) for pair in {pairs!r}]" if pairs else "[]"
        config = [
            f"stage={settings.stage}",
            *([f'dtype="{settings.dtype_name}"'] if settings.dtype_name != "fp32" else []),
        ]
        owner_names = [f"AccumulationOwner.{owner.name}" for owner in sorted(owners, key=owner_sort_key)]
        lines = [
            f"SEED = {settings.seed}",
            f"VARIANT = {quote(settings.variant)}",
            f"DTYPE = {settings.dtype}",
            f"REDUCE_DTYPE = {settings.reduce_dtype}",
            f"EXACT = {settings.exact}  # True if no sum is rounded in any order: integers over powers of two",
            f"ZEROS_ALLOWED = {settings.zeros_allowed}",
            f"ELEMENTS = {settings.element_count}",
            f"OWNERS = [{', '.join(owner_names)}]",
            f"Feature = SimpleNamespace({', '.join(f'{feature.name}={feature.name!r}' for feature in features)})",
            f"CLAIMS = SimpleNamespace(own_kernels={kernels!r}, neutral_options={options!r}, "
            f"neutral_exclusions={exclusions}, refusal={refused!r}.get)",
            f"TRAINING = {settings.training or None}",
            f"MAKE = {factory_expression(settings.engine)}",
            f"OPTIONS = {dict(settings.options)!r}",
            f"CONFIG = EngineConfig({', '.join(config)}, micro_batch_size=SAMPLES, options=OPTIONS)",
        ]
        return "\n".join(lines)

    def render_styles(self, settings: ScriptSettings) -> str:
        """Return the text of TENSOR_RANKS and STYLES, the torch ParallelStyle of each module of the plan."""
        parallel = ("ColwiseParallel", "RowwiseParallel", "SequenceParallel")
        self.imports += [f"from torch.distributed.tensor import {name}" for name in ("Replicate", "Shard")]
        self.imports += [f"from torch.distributed.tensor.parallel import {name}" for name in parallel]
        styles = [f"    {quote(name)}: {render_style(word)}," for name, word in settings.tp_plan.items()]
        return "\n".join([f"TENSOR_RANKS = {settings.tensor_ranks}", "STYLES = {", *styles, "}"])

    def render_formulas(self, used_text: str) -> str:
        """Return the text of FORMULAS, which contains the formulas of the optimizers that ``used_text`` names."""
        named = {node.value for node in ast.walk(ast.parse(used_text)) if isinstance(node, ast.Constant)}
        for used in (BoundedTensor, step_hyperparameters):
            self.add_definition(used)
        module, found = formulas.__name__, []
        table = read_source(module).definitions["FORMULAS"]
        assert isinstance(table, ast.AnnAssign), "FORMULAS is annotated"
        assert isinstance(table.value, ast.Dict), "FORMULAS is a dictionary"
        for key, value in zip(table.value.keys, table.value.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str) and key.value in named:
                found.append(f'"{key.value}": {self.collection.render_expression(module, value)}')
        return f"FORMULAS = {{{', '.join(found)}}}"

    def read_part(self, name: str) -> str:
        """Return the text of the fixed part ``name`` without its imports, and add these imports to the script's."""
        imports, text = split_imports((PARTS_FOLDER / f"{name}.py.txt").read_text(encoding="utf-8"))
        self.imports += imports
        return text


def render_style(word: str) -> str:
    """Return the expression of torch's ParallelStyle for a word of a plan, as ``make_style`` constructs it."""
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(make_style))).body
    for case in (node for node in ast.walk(function) if isinstance(node, ast.match_case)):
        if isinstance(case.pattern, ast.MatchValue) and ast.literal_eval(case.pattern.value) == word:
            (statement,) = case.body
            assert isinstance(statement, ast.Return), "each case returns a style"
            assert statement.value is not None, "each case returns a style"
            return ast.unparse(statement.value)
    raise UsageError(f"cannot export the cell: its plan has the word {word!r}, which is unknown")


def names_defined_in_parts(*parts: str) -> frozenset[str]:
    """Return the names that the fixed parts called ``parts`` define at module level."""
    texts = [(PARTS_FOLDER / f"{name}.py.txt").read_text(encoding="utf-8") for name in parts]
    return frozenset(name for text in texts for statement in ast.parse(text).body for name in defined_names(statement))


def quote(text: str) -> str:
    """Return ``text`` as a Python string literal in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def owner_sort_key(owner: AccumulationOwner) -> str:
    """Return a sort key that puts the caller before the engine; a script uses the last owner that the engine claims."""
    return owner.name


def is_owner_claimed(owner: AccumulationOwner, claims: Capabilities) -> bool:
    """Return whether an engine claims that ``owner`` may be the accumulation owner."""
    feature = Feature.ENGINE_ACCUMULATION if owner is AccumulationOwner.ENGINE else Feature.CALLER_ACCUMULATION
    return claims.refusal(feature) is None


def join_definitions(texts: Iterable[str]) -> str:
    """Join definitions with two blank lines between them, but without blank lines between one-line constants."""
    found = ""
    for text in texts:
        lone = "\n" not in text and not text.startswith(("def ", "class "))
        found += ("\n" if found and lone and ends_with_constant(found) else "\n\n\n" if found else "") + text
    return found


def ends_with_constant(text: str) -> bool:
    """Return whether the last line of ``text`` assigns a constant."""
    last = text.splitlines()[-1]
    return bool(last) and not last[0].isspace() and last[0] not in ")]}" and " = " in last


def normalize_blank_lines(text: str) -> str:
    """Reduce blank lines to at most two before a top-level definition, and to at most one inside a class."""
    text = re.sub(r"\n{4,}", "\n\n\n", text)
    return re.sub(r"\n{3,}(?= )", "\n\n", text)
