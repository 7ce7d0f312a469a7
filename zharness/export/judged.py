"""The script of any cell: the law's own observer and its own judge, written out with all that they use.

It is many times as long as a script whose plain side is told in a few lines (``zharness.export.script``), and is
written where there is no such telling: what the law looks at is more than values, gradients, weights and an optimizer's
state, or the cell's dtype and options ask for more than fp32 arithmetic. Nothing in it is a second version of anything.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

from zharness.case import Case
from zharness.checks import DTYPES, LOSS_SCALES, check_named
from zharness.engines import Capabilities, EngineConfig, registry
from zharness.export.frame import (
    ALWAYS,
    WRITTEN,
    Script,
    Writing,
    engine_name,
    joined,
    maker,
    prelude_of,
    quoted,
    spaced,
)
from zharness.export.spelled import spelled
from zharness.export.text import import_block, names_in, pruned
from zharness.run.cell import options_of
from zharness.run.configuration import configured
from zharness.workload.foreign import is_foreign

# What the part "judged" has of its own, the constants of the cell, and what only annotations name.
GIVEN = frozenset({"Records", "conditions", "attribute", "Check", "SPEC"})
ROOTS = (
    ("zharness.checks.bench", "Bench"),
    ("zharness.checks.trial", "Trial"),
    ("zharness.parity.baseline", "Baseline"),
    ("zharness.parity.snapshot", "Evidence"),
    ("zharness.parity.contamination", "Conditions"),
    ("zharness.errors", "EngineContractError"),
)


def judged_script(case: Case, salt: int, claims: Capabilities, told: tuple[str, str, str], model: Model) -> Script:
    """The script of ``case``; ``told`` are its docstring, its signature and the line that it ends with.

    ``model(writing)`` is the text that makes SPEC. Raises UsageError for what no script can say.
    """
    head, signature, ok = told
    writing = Writing(case.engine, GIVEN)
    for root in ROOTS:
        writing.collection.add(*root)
    spec = model(writing)
    constants = constants_of(writing, case, salt, claims)
    sections = [
        f"SIGNATURE = {quoted(signature)}\nOK = {quoted(ok)}",
        joined(writing.collection.texts.values()),
        spec,
        constants,
        writing.part("judged"),
        writing.part("main"),
    ]
    body = pruned("\n\n\n".join(sections))
    used = names_in(ast.parse(body))
    prelude = "" if engine_name(case.engine) in WRITTEN else prelude_of(case.engine, used)
    statements = [*writing.collection.imports.values(), *writing.imports, *ALWAYS]
    block = import_block(statements, used | names_in(ast.parse(prelude)))
    text = "\n\n".join(part for part in (head, block, prelude) if part)
    return Script(spaced(f"{text}\n\n{body}\n"), signature, ok)


Model = Callable[[Writing], str]


def constants_of(writing: Writing, case: Case, salt: int, claims: Capabilities) -> str:
    """What was chosen: the cell, and what its engine claims."""
    check, asked, options = check_named(case.check), configured(case.engine_variant), options_of(case, claims)

    def text(value: Any) -> str:
        return spelled(value, writing.collection, writing.imports)

    config = EngineConfig(case.stage, case.dtype, loss_scale=LOSS_SCALES[case.dtype], options=options)
    wire = asked.wire or asked.autocast or DTYPES.get(claims.wires.get(case.dtype, ""))
    lines = [
        f"SEED = {case.seed(salt)}",
        f"VARIANT = {quoted(case.variant)}",
        f"DTYPE = {text(DTYPES[case.dtype])}",
        f"LOSS_SCALE = {text(LOSS_SCALES[case.dtype])}",
        f"AUTOCAST = {text(asked.autocast)}  # that of a user's configuration",
        f"WIRE = {text(wire)}  # in which gradients are reduced, where that is not DTYPE",
        f"TRAINING = {text(asked.training)}",
        f"CONFIG = {text(config)}",
        f"CLAIMS = {claims_told(case, claims, text)}",
        f"MAKE = {made(writing, case.engine)}",
        f"BESIDE = {beside(writing, case, claims, text)}",
        f"observe = {function(writing, check.observe)}",
        f"judge = {function(writing, check.judge)}",
    ]
    return "\n".join(lines)


def claims_told(case: Case, claims: Capabilities, text: Callable[[Any], str]) -> str:
    """What the engine claims, one reason a line."""
    return text(claims).replace(", Feature.", ",\n    Feature.")


def made(writing: Writing, engine: str) -> str:
    """The engine's factory: this package's own around torch's and DeepSpeed's, by its definition."""
    if engine_name(engine) not in WRITTEN:
        return maker(engine)
    module, _, factory = registry.require(engine).target.partition(":")
    writing.collection.add(module, factory)
    return factory


def beside(writing: Writing, case: Case, claims: Capabilities, text: Callable[[Any], str]) -> str:
    """The plain model of the case; a user's own has the nodes in its graph that the engine puts there."""
    if claims.junctions is None or not is_foreign(case.model):
        return "SPEC"
    writing.collection.add("zharness.parity.junctions", "with_junctions")
    return f"with_junctions(SPEC, {text(claims.junctions)}, CONFIG.options)"


def function(writing: Writing, one: Callable[..., Any]) -> str:
    """A law's observer or judge: a function of its module, or what a function of it makes of a scene."""
    outer, _, inner = one.__qualname__.partition(".")
    writing.collection.add(one.__module__, outer)
    if not inner:
        return outer
    held = inspect.getclosurevars(one).nonlocals
    return f"{outer}({', '.join(spelled(value, writing.collection, writing.imports) for value in held.values())})"
