"""Parse programs from text, and reject programs that plain PyTorch could not run."""

from __future__ import annotations

import re
from dataclasses import replace

from zharness.errors import UsageError
from zharness.workload.programs import (
    BLOCK_KINDS,
    Act,
    Layer,
    LayerKind,
    Mark,
    ModelShape,
    Program,
    Verb,
    explain_illegal_verb,
    iter_verbs,
    join_words,
    shape_after_layer,
)

_LAYER_TOKEN = re.compile(r"(?P<close>\])|(?P<name>[a-z]+)(?:\((?P<sizes>[0-9, ]*)\))?(?P<open>\[)?")


DEFAULT_SETTINGS = Program((), ())


def parse_program(text: str, settings: Program = DEFAULT_SETTINGS) -> Program:
    """Parse the layers and verbs of a program from ``text``, and take all other fields from ``settings``.

    Raises UsageError if the text cannot be parsed or the program is not legal.
    """
    model, bar, calls = text.partition("|")
    if not bar:
        raise UsageError(f"not a program: {text!r}; expected a model, | and verbs, as in 'x(3) linear(2) relu | f b s'")
    layers = tuple(parse_layers(model))
    program = replace(settings, layers=layers, verbs=tuple(parse_verb(word) for word in calls.split()))
    require_legal(program)
    return program


def require_legal(program: Program) -> None:
    """Raise UsageError if plain PyTorch could not run ``program``."""
    shape = ModelShape()
    for layer in program.layers:
        shape = shape_after_layer(shape, layer)
    if not shape.trained_count:
        raise UsageError(
            f"{program.model or 'an empty model'}: no layer is trained in every micro-batch; add one, such as linear(2)"
        )
    for number, verb, caller in iter_verbs(program):
        reason = explain_illegal_verb(program.layers, caller, verb)
        if reason:
            raise UsageError(f"verb {number} of {join_words(program.verbs)!r}, {verb}: {reason}")


def parse_layers(text: str) -> list[Layer]:
    """Parse the layers of a model, without checking that they fit together."""
    stack: list[list[Layer]] = [[]]
    open_blocks: list[LayerKind] = []
    rest = text.strip()
    while rest:
        token = _LAYER_TOKEN.match(rest)
        if token is None or (token["close"] and not open_blocks):
            raise UsageError(f"not a model: {text!r}; cannot read {rest!r}; expected layers, as in 'x(3) linear(2)'")
        rest = rest[token.end() :].lstrip()
        if token["close"]:
            inner = tuple(stack.pop())
            stack[-1].append(Layer(open_blocks.pop(), (), inner))
            continue
        kind = parse_layer_kind(token["name"])
        if bool(token["open"]) != (kind in BLOCK_KINDS):
            raise UsageError(
                f"not a model: {text!r}; expected '[' after {', '.join(k.value for k in BLOCK_KINDS)}, and only there"
            )
        if token["open"]:
            open_blocks.append(kind)
            stack.append([])
        else:
            sizes = token["sizes"] or ""
            stack[-1].append(Layer(kind, tuple(int(size) for size in sizes.split(",") if size.strip())))
    if open_blocks:
        raise UsageError(f"not a model: {text!r}; expected a ']' for every '['")
    return stack[0]


def parse_layer_kind(name: str) -> LayerKind:
    """Return the kind of layer with the name ``name``. Raises UsageError if there is no such kind."""
    try:
        return LayerKind(name)
    except ValueError:
        raise UsageError.unknown_name("layer", name, [kind.value for kind in LayerKind]) from None


def parse_verb(word: str) -> Verb:
    """Parse one verb with its marks, as in ``b:old,retain``. Raises UsageError if the verb or a mark is unknown."""
    name, _, marks = word.partition(":")
    try:
        act = Act(name)
    except ValueError:
        raise UsageError.unknown_name("verb", name, [act.value for act in Act]) from None
    mark_names = [mark for mark in marks.split(",") if mark]
    for mark in mark_names:
        if mark not in {known.value for known in Mark}:
            raise UsageError.unknown_name(f"mark of the verb {name}:", mark, [known.value for known in Mark])
    return Verb(act, tuple(mark for mark in Mark if mark.value in mark_names))
