"""Programs read from their text, and refused where plain PyTorch could not run them."""

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
    """The program that ``text`` writes, in all else as ``settings``.

    Raises UsageError for one that cannot be read, or that is not legal.
    """
    model, bar, calls = text.partition("|")
    if not bar:
        raise UsageError(f"not a program: {text!r}; expected a model, | and verbs: 'x(3) linear(2) relu | f b s'")
    layers = tuple(parse_layers(model))
    program = replace(settings, layers=layers, verbs=tuple(parse_verb(word) for word in calls.split()))
    require_legal(program)
    return program


def require_legal(program: Program) -> None:
    """Raises UsageError unless plain PyTorch could run ``program``."""
    widths = ModelShape()
    for layer in program.layers:
        widths = shape_after_layer(widths, layer)
    if not widths.trained_count:
        raise UsageError(f"{program.model or 'an empty model'}: nothing in it is trained in every micro-batch")
    for place, verb, book in iter_verbs(program):
        reason = explain_illegal_verb(program.layers, book, verb)
        if reason:
            raise UsageError(f"verb {place} of {join_words(program.verbs)!r}, {verb}: {reason}")


def parse_layers(text: str) -> list[Layer]:
    """The layers that ``text`` writes, whether or not they fit."""
    stack: list[list[Layer]] = [[]]
    opened: list[LayerKind] = []
    rest = text.strip()
    while rest:
        found = _LAYER_TOKEN.match(rest)
        if found is None or (found["close"] and not opened):
            raise UsageError(f"not a model: {text!r}; cannot read {rest!r}, expected layers as in 'x(3) linear(2)'")
        rest = rest[found.end() :].lstrip()
        if found["close"]:
            inner = tuple(stack.pop())
            stack[-1].append(Layer(opened.pop(), (), inner))
            continue
        kind = parse_layer_kind(found["name"])
        if bool(found["open"]) != (kind in BLOCK_KINDS):
            raise UsageError(
                f"not a model: {text!r}; expected [ behind {join_words(k.value for k in BLOCK_KINDS)} alone"
            )
        if found["open"]:
            opened.append(kind)
            stack.append([])
        else:
            sizes = found["sizes"] or ""
            stack[-1].append(Layer(kind, tuple(int(size) for size in sizes.split(",") if size.strip())))
    if opened:
        raise UsageError(f"not a model: {text!r}; expected a ] for every [")
    return stack[0]


def parse_layer_kind(name: str) -> LayerKind:
    """The kind of layer of that name. Raises UsageError when there is none."""
    try:
        return LayerKind(name)
    except ValueError:
        raise UsageError.unknown_name("layer", name, [kind.value for kind in LayerKind]) from None


def parse_verb(word: str) -> Verb:
    """One verb with its marks, as in ``b:old,retain``. Raises UsageError for any other word."""
    name, _, marks = word.partition(":")
    try:
        act = Act(name)
    except ValueError:
        raise UsageError.unknown_name("verb", name, [act.value for act in Act]) from None
    given = [mark for mark in marks.split(",") if mark]
    for mark in given:
        if mark not in {known.value for known in Mark}:
            raise UsageError.unknown_name(f"mark of {name}", mark, [known.value for known in Mark])
    return Verb(act, tuple(mark for mark in Mark if mark.value in given))
