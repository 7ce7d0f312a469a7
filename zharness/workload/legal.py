"""Programs out of wishes: those of a list of layers, or of verbs, that are legal where they come; and smaller ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zharness.errors import UsageError
from zharness.workload.programs import (
    BLOCKS,
    KEEPS_WIDTH,
    NEW_GRAPH,
    SOURCES,
    Book,
    Kind,
    Layer,
    Program,
    Verb,
    Widths,
    accumulates,
    behind,
    done,
    refusal,
)

MANY = 100  # outputs in a caller's hand: more than any program has


@dataclass(frozen=True)
class Limits:
    """What an engine allows its caller: outputs in hand at once, and several backwards before a step or not."""

    outputs: int = MANY
    accumulates: bool = True

    def allow(self, book: Book, verb: Verb) -> bool:
        """Whether a caller with ``book`` in hand may do ``verb``, as far as these go."""
        crowded = verb.act in NEW_GRAPH and len(book.kept) >= self.outputs
        return not crowded and (self.accumulates or not accumulates(book, verb))


NO_LIMITS = Limits()
Batch = tuple[Program, ...]  # programs that run one after the other in the same ranks


def legal_layers(wishes: Sequence[Layer]) -> list[Layer]:
    """The wishes that are legal where they come; where nothing of them is trained, a linear layer behind them."""
    layers, widths = fitted(wishes, Widths())
    return layers if widths.trained else [*layers, Layer(Kind.LINEAR, (1,))]


def fitted(wishes: Sequence[Layer], widths: Widths) -> tuple[list[Layer], Widths]:
    """Those of ``wishes`` that can stand behind ``widths``, and what is known behind them."""
    layers = []
    for wish in wishes:
        if wish.kind is Kind.TIED and widths.weights and widths.fitting() is None:
            layers.append(Layer(Kind.LINEAR, (widths.weights[-1][1],)))
            widths = behind(widths, layers[-1])
        fits = filled(wish, widths) if wish.kind in BLOCKS else wish
        try:
            widths = behind(widths, fits)
        except UsageError:
            continue
        layers.append(fits)
    return layers, widths


def filled(block: Layer, widths: Widths) -> Layer:
    """``block`` with those inner layers that fit; one that has to keep the width gets it back by a linear layer."""
    inner, after = fitted(block.inner, widths)
    if block.kind in KEEPS_WIDTH and after.width != widths.width:
        inner.append(Layer(Kind.LINEAR, (widths.width,)))
    return replace(block, inner=tuple(inner))


def legal_verbs(
    layers: Sequence[Layer], wishes: Sequence[Verb], limits: Limits = NO_LIMITS, window: int = 1
) -> tuple[Verb, ...]:
    """The wishes that are legal where they come, and within ``limits``, with ``window`` micro-batches a step."""
    book, kept = Book(window=window), []
    for wish in wishes:
        if limits.allow(book, wish) and not refusal(layers, book, wish):
            kept.append(wish)
            book = done(book, wish)
    return tuple(kept)


def smaller_batches(batch: Batch, limits: Limits = NO_LIMITS) -> Iterator[Batch]:
    """Batches that are smaller by one cut, those that may be much smaller first."""
    if len(batch) > 1:
        yield from ((program,) for program in batch)
        yield from (batch[:at] + batch[at + 1 :] for at in range(len(batch)))
    for at, program in enumerate(batch):
        for less in smaller(program, limits):
            yield (*batch[:at], less, *batch[at + 1 :])


def smaller(program: Program, limits: Limits = NO_LIMITS) -> Iterator[Program]:
    """Legal programs with some verbs less, a layer less, a mark less, or smaller sizes."""
    for candidate in cuts(program):
        layers = tuple(legal_layers(candidate.layers))
        legal = replace(candidate, layers=layers, verbs=legal_verbs(layers, candidate.verbs, limits, program.window))
        if layers[0].kind in SOURCES and size(legal) < size(program):
            yield legal


def size(program: Program) -> tuple[int, int, int]:
    """What a cut has to make smaller: first verbs and layers, then marks, then the sizes of layers."""
    layers = list(program.walk())
    marks = sum(len(verb.marks) for verb in program.verbs)
    return len(layers) + len(program.verbs), marks, sum(sum(layer.sizes) for layer in layers)


def cuts(program: Program) -> Iterator[Program]:
    """One cut each, legal or not."""
    verbs = program.verbs
    length = len(verbs) // 2
    while length:
        for start in range(0, len(verbs), length):
            yield replace(program, verbs=verbs[:start] + verbs[start + length :])
        length //= 2
    for layers in cut_layers(program.layers):
        yield replace(program, layers=layers)
    for at, verb in enumerate(verbs):
        for mark in verb.marks:
            plainer = replace(verb, marks=tuple(other for other in verb.marks if other is not mark))
            yield replace(program, verbs=(*verbs[:at], plainer, *verbs[at + 1 :]))


def cut_layers(layers: tuple[Layer, ...]) -> Iterator[tuple[Layer, ...]]:
    """The layers without one, with one replaced by what is inside it, or with one of smaller sizes."""
    for at, layer in enumerate(layers):
        before, after = layers[:at], layers[at + 1 :]
        yield (*before, *after)
        if layer.kind in BLOCKS:
            yield (*before, *layer.inner, *after)
            for inner in cut_layers(layer.inner):
                yield (*before, replace(layer, inner=inner), *after)
        for sizes in {tuple(1 for _ in layer.sizes), tuple(-(-each // 2) for each in layer.sizes)} - {layer.sizes}:
            yield (*before, replace(layer, sizes=sizes), *after)
