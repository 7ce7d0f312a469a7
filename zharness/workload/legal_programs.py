"""Make legal programs from arbitrary lists of layers and verbs (calls), and make programs smaller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from zharness.errors import UsageError
from zharness.workload.model_shape import ModelShape, shape_after_layer
from zharness.workload.programs import (
    BLOCK_KINDS,
    ENGINE,
    GRAPH_ACTS,
    SOURCE_KINDS,
    WIDTH_PRESERVING_KINDS,
    CallerState,
    Layer,
    LayerKind,
    Program,
    Verb,
    apply_verb,
    explain_illegal_verb,
    is_accumulating,
)

T = TypeVar("T")
UNLIMITED_OUTPUTS = 100  # more outputs than any program keeps


@dataclass(frozen=True)
class CallerLimits:
    """The limits that an engine puts on the code that calls it.

    ``max_outputs`` is the number of outputs that the caller may keep for later backwards. ``can_accumulate`` says
    whether the caller may run several backwards before a step.
    """

    max_outputs: int = UNLIMITED_OUTPUTS
    can_accumulate: bool = True

    def allows(self, caller: CallerState, verb: Verb) -> bool:
        """Return whether these limits allow ``verb`` when the caller is in the state ``caller``."""
        exceeds_outputs = verb.act in GRAPH_ACTS and len(caller.outputs) >= self.max_outputs
        return not exceeds_outputs and (self.can_accumulate or not is_accumulating(caller, verb))


NO_LIMITS = CallerLimits()
ProgramBatch = tuple[Program, ...]  # programs that run one after the other in the same ranks


def legal_layers(candidates: Sequence[Layer]) -> list[Layer]:
    """Return those of ``candidates`` that form a legal model in their order.

    If no candidate is trained, append a linear layer.
    """
    layers, shape = fit_layers(candidates, ModelShape())
    return layers if shape.trained_count else [*layers, Layer(LayerKind.LINEAR, (1,))]


def fit_layers(candidates: Sequence[Layer], model_shape: ModelShape) -> tuple[list[Layer], ModelShape]:
    """Return the candidates that fit after a model of shape ``model_shape``, and the shape of the model with them.

    If no earlier weight fits a tied layer, a linear layer is inserted before it. Inner layers that do not fit are
    removed from blocks.
    """
    layers = []
    for candidate in candidates:
        if candidate.kind is LayerKind.TIED and model_shape.weights and model_shape.find_tieable_weight() is None:
            layers.append(Layer(LayerKind.LINEAR, (model_shape.weights[-1][1],)))
            model_shape = shape_after_layer(model_shape, layers[-1])
        layer = fit_block(candidate, model_shape) if candidate.kind in BLOCK_KINDS else candidate
        try:
            model_shape = shape_after_layer(model_shape, layer)
        except UsageError:
            continue
        layers.append(layer)
    return layers, model_shape


def fit_block(block: Layer, model_shape: ModelShape) -> Layer:
    """Return ``block`` with only the inner layers that fit after a model of shape ``model_shape``.

    If the block must keep the width but the remaining layers change it, a linear layer that restores the width is
    appended.
    """
    inner, after = fit_layers(block.inner, model_shape)
    if block.kind in WIDTH_PRESERVING_KINDS and after.width != model_shape.width:
        inner.append(Layer(LayerKind.LINEAR, (model_shape.width,)))
    return replace(block, inner=tuple(inner))


def legal_verbs(
    layers: Sequence[Layer],
    candidates: Sequence[Verb],
    limits: CallerLimits = NO_LIMITS,
    window: int = 1,
    window_owner: str = ENGINE,
) -> tuple[Verb, ...]:
    """Return those of ``candidates`` that are legal in their order and within the engine's ``limits``.

    ``layers`` are the layers of the program's model. ``window`` is the number of micro-batches per step, which
    ``window_owner`` counts.
    """
    caller, legal = CallerState(window=window, window_owner=window_owner), []
    for verb in candidates:
        if limits.allows(caller, verb) and not explain_illegal_verb(layers, caller, verb):
            legal.append(verb)
            caller = apply_verb(caller, verb)
    return tuple(legal)


def smaller_batches(batch: ProgramBatch, limits: CallerLimits = NO_LIMITS) -> Iterator[ProgramBatch]:
    """Yield smaller versions of ``batch``, the largest reductions first.

    Each version has fewer programs than ``batch``, or makes one of its programs smaller.
    """
    if len(batch) > 1:
        yield from ((program,) for program in batch)
        yield from (batch[:index] + batch[index + 1 :] for index in range(len(batch)))
    for index, program in enumerate(batch):
        for smaller in smaller_programs(program, limits):
            yield (*batch[:index], smaller, *batch[index + 1 :])


def smaller_programs(program: Program, limits: CallerLimits = NO_LIMITS) -> Iterator[Program]:
    """Yield smaller legal programs: ``program`` without some verbs, a layer or a mark, or with smaller layer sizes.

    A mark is an option of a verb.
    """
    for candidate in program_cuts(program):
        layers = tuple(legal_layers(candidate.layers))
        verbs = legal_verbs(layers, candidate.verbs, limits, program.window, program.window_owner)
        legal = replace(candidate, layers=layers, verbs=verbs)
        if layers[0].kind in SOURCE_KINDS and program_size(legal) < program_size(program):
            yield legal


def program_size(program: Program) -> tuple[int, int, int]:
    """Return the size of ``program``, a tuple that becomes smaller with every cut.

    The tuple holds the number of layers and verbs, the number of marks, and the sum of the layers' sizes.
    """
    layers = list(program.walk())
    marks = sum(len(verb.marks) for verb in program.verbs)
    return len(layers) + len(program.verbs), marks, sum(sum(layer.sizes) for layer in layers)


def program_cuts(program: Program) -> Iterator[Program]:
    """Yield programs, not necessarily legal, each with one thing removed: verbs, part of the layers or a mark."""
    verbs = program.verbs
    for fewer in remove_runs(verbs):
        yield replace(program, verbs=fewer)
    for layers in cut_layers(program.layers):
        yield replace(program, layers=layers)
    for index, verb in enumerate(verbs):
        for mark in verb.marks:
            unmarked = replace(verb, marks=tuple(other for other in verb.marks if other is not mark))
            yield replace(program, verbs=(*verbs[:index], unmarked, *verbs[index + 1 :]))


def remove_runs(items: tuple[T, ...]) -> Iterator[tuple[T, ...]]:
    """Yield ``items`` without some that follow each other: without a half, a quarter and so on, then without one."""
    length = len(items) // 2
    while length:
        for start in range(0, len(items), length):
            yield items[:start] + items[start + length :]
        length //= 2


def cut_layers(layers: tuple[Layer, ...]) -> Iterator[tuple[Layer, ...]]:
    """Yield versions of ``layers`` with one layer removed, replaced by its inner layers, or given smaller sizes."""
    for index, layer in enumerate(layers):
        before, after = layers[:index], layers[index + 1 :]
        yield (*before, *after)
        if layer.kind in BLOCK_KINDS:
            yield (*before, *layer.inner, *after)
            for inner in cut_layers(layer.inner):
                yield (*before, replace(layer, inner=inner), *after)
        for sizes in {tuple(1 for _ in layer.sizes), tuple(-(-size // 2) for size in layer.sizes)} - {layer.sizes}:
            yield (*before, replace(layer, sizes=sizes), *after)
