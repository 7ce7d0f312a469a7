"""Programs: a small model and an order of calls as frozen data, written and read as one line of text.

``x(3) linear(2) relu | f b:retain b s`` is a model of three inputs, a linear layer with two outputs and a ReLU, and a
caller who runs a forward, two backwards on its graph and a step. What a caller may do is what plain PyTorch allows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from zharness.errors import UsageError

Shape = tuple[int, int]  # outputs and inputs of a weight


class Kind(Enum):
    """The kinds of layers, each from (samples, width) to (samples, width); the first two begin a model."""

    INPUTS = "x"  # x(width): floats
    TOKENS = "tokens"  # tokens(vocabulary, width): token ids, and their embedding
    LINEAR = "linear"  # linear(outputs)
    MATRIX = "matrix"  # matrix(outputs): a linear layer without bias
    FROZEN = "frozen"  # frozen(outputs): a linear layer that is not trained
    READ = "read"  # read(outputs): a matrix whose weight is read by attribute, its module never called
    TIED = "tied"  # the weight of the nearest layer before that fits, once more
    CONV = "conv"  # conv(channels): a convolution along the width
    NORM = "norm"
    RELU = "relu"
    GELU = "gelu"
    UNUSED = "unused"  # unused(elements): a parameter that nobody uses
    RESIDUAL = "residual"  # residual[...]: what is inside, added to what comes in
    TWICE = "twice"  # twice[...]: the same modules called twice
    CHECKPOINT = "checkpoint"  # checkpoint[...]: recomputed in backward
    REENTRANT = "reentrant"  # reentrant[...]: the same by torch's older implementation
    SOMETIMES = "sometimes"  # sometimes[...]: in every second micro-batch alone


SOURCES = (Kind.INPUTS, Kind.TOKENS)
SIZED = (Kind.LINEAR, Kind.MATRIX, Kind.FROZEN, Kind.READ, Kind.CONV, Kind.UNUSED)
BLOCKS = (Kind.RESIDUAL, Kind.TWICE, Kind.CHECKPOINT, Kind.REENTRANT, Kind.SOMETIMES)
KEEPS_WIDTH = (Kind.RESIDUAL, Kind.TWICE, Kind.SOMETIMES)  # of the blocks, those that need what they end with
TRAINED = (Kind.TOKENS, Kind.LINEAR, Kind.MATRIX, Kind.READ, Kind.TIED, Kind.CONV, Kind.NORM)
ARITY = {Kind.TOKENS: 2, Kind.INPUTS: 1, **dict.fromkeys(SIZED, 1)}  # sizes that a layer is written with


class Act(Enum):
    """What a caller does. A micro-batch is new for every forward."""

    FORWARD = "f"  # the output is kept
    BACKWARD = "b"  # of the newest output that is kept
    NO_SYNC = "n"  # forward and backward of one micro-batch in no_sync
    STEP = "s"  # step and zero_grad; outputs that are kept are dropped
    ZERO_GRAD = "z"
    NO_GRAD = "e"  # a forward under no_grad
    INFERENCE = "i"  # a forward under inference_mode
    INPUT_GRAD = "g"  # autograd.grad of a new forward with respect to its inputs
    SAVE = "save"
    LOAD = "load"  # what was saved last


NEW_GRAPH = (Act.FORWARD, Act.NO_SYNC)  # those of the outputs in hand are there as well


class Mark(Enum):
    """How a backward is done, where not by ``engine.backward`` of the mean squared error of the newest output."""

    OLD = "old"  # of the oldest output that is kept
    TENSOR = "tensor"  # loss.backward()
    SCALE = "scale"  # engine.scale(loss).backward()
    OTHER = "other"  # another loss of the same output
    RETAIN = "retain"  # the graph is retained, and the output stays


@dataclass(frozen=True)
class Layer:
    """One layer; ``sizes`` as its kind says, ``inner`` for blocks alone."""

    kind: Kind
    sizes: tuple[int, ...] = ()
    inner: tuple[Layer, ...] = ()

    def __str__(self) -> str:
        sizes = f"({','.join(map(str, self.sizes))})" if self.sizes else ""
        inner = f"[{words(self.inner)}]" if self.kind in BLOCKS else ""
        return f"{self.kind.value}{sizes}{inner}"

    def walk(self) -> Iterator[Layer]:
        """This layer and all within."""
        yield self
        for layer in self.inner:
            yield from layer.walk()


@dataclass(frozen=True)
class Verb:
    """One act; ``marks`` are those of a backward, in the order of Mark."""

    act: Act
    marks: tuple[Mark, ...] = ()

    def __str__(self) -> str:
        return f"{self.act.value}:{','.join(mark.value for mark in self.marks)}" if self.marks else self.act.value


@dataclass(frozen=True)
class Program:
    """A model, what a caller does with it, and where: one example of all that training may be.

    ``layers`` begin with a source. ``optimizer`` is a name of ``zharness.checks.program.OPTIMIZERS``.
    """

    layers: tuple[Layer, ...]
    verbs: tuple[Verb, ...]
    stage: int = 0
    world_size: int = 2
    dtype: str = "fp32"
    optimizer: str = "adamw"

    @property
    def model(self) -> str:
        """The model as text; it names the model's batches too."""
        return words(self.layers)

    def __str__(self) -> str:
        return f"{self.model} | {words(self.verbs)}".rstrip()

    def walk(self) -> Iterator[Layer]:
        """Every layer, those within blocks too."""
        for layer in self.layers:
            yield from layer.walk()


def words(things: Iterable[object]) -> str:
    """Their texts, with spaces between."""
    return " ".join(map(str, things))


@dataclass(frozen=True)
class Widths:
    """What is known behind some layers: the width, the weights that may be tied, whether a gradient flows back."""

    width: int = 0
    weights: tuple[Shape, ...] = ()
    trained: int = 0

    def fitting(self) -> Shape | None:
        """The nearest weight that a tied layer could use."""
        return next((shape for shape in reversed(self.weights) if shape[1] == self.width), None)


def behind(widths: Widths, layer: Layer) -> Widths:
    """What is known behind ``layer``. Raises UsageError where the layer cannot stand there."""
    kind, sizes, width = layer.kind, layer.sizes, widths.width
    if len(sizes) != ARITY.get(kind, 0) or not all(size > 0 for size in sizes):
        raise UsageError(f"{layer}: expected {ARITY.get(kind, 0)} sizes above 0 for {kind.value}")
    if (kind in SOURCES) != (width == 0):
        raise UsageError(f"{layer}: a model begins with {' or '.join(k.value for k in SOURCES)}, and only there")
    after = replace(widths, trained=widths.trained + (kind in TRAINED))
    if kind in BLOCKS:
        return behind_block(widths, layer)
    if kind is Kind.INPUTS:
        return replace(after, width=sizes[0])
    if kind is Kind.TOKENS:
        return replace(after, width=sizes[1], weights=((sizes[0], sizes[1]),))
    if kind in (Kind.LINEAR, Kind.MATRIX):
        return replace(after, width=sizes[0], weights=(*widths.weights, (sizes[0], width)))
    if kind in (Kind.FROZEN, Kind.READ):
        return replace(after, width=sizes[0])
    if kind is Kind.CONV:
        return replace(after, width=sizes[0] * width)
    if kind is Kind.TIED:
        shape = widths.fitting()
        if shape is None:
            raise UsageError(f"tied: no linear, matrix or tokens before has a weight for {width} inputs")
        return replace(after, width=shape[0])
    return after


def behind_block(widths: Widths, block: Layer) -> Widths:
    """``behind`` for a layer with layers inside."""
    after = widths
    for layer in block.inner:
        after = behind(after, layer)
    if block.kind in KEEPS_WIDTH and after.width != widths.width:
        raise UsageError(f"{block}: it ends with width {after.width}, and has to end with {widths.width} as it begins")
    if block.kind is Kind.REENTRANT and not widths.trained:
        raise UsageError(f"{block}: nothing before it is trained, so torch would give it no gradients")
    # What is left out in every second micro-batch alone gives no gradient to rely on.
    return replace(after, trained=widths.trained) if block.kind is Kind.SOMETIMES else after


class Pending(Enum):
    """What has become of the gradients since the last step or zero_grad."""

    NOTHING = "no gradient"
    REDUCED = "gradients, reduced"
    UNREDUCED = "gradients, the last of them under no_sync alone"


@dataclass(frozen=True)
class Book:
    """What a caller has in hand: ``kept`` outputs by their micro-batch, ``drawn`` micro-batches, ``saved`` times."""

    kept: tuple[int, ...] = ()
    drawn: int = 0
    pending: Pending = Pending.NOTHING
    saved: int = 0

    def chosen(self, verb: Verb) -> int:
        """The micro-batch of the output that a backward takes."""
        return self.kept[0 if Mark.OLD in verb.marks else -1]


def refusal(layers: Sequence[Layer], book: Book, verb: Verb) -> str:
    """Why a caller with ``book`` in hand cannot do ``verb``; nothing where plain PyTorch allows it."""
    act = verb.act
    if verb.marks and act not in (Act.BACKWARD, Act.NO_SYNC):
        return "marks are those of a backward"
    if act is Act.NO_SYNC and {Mark.OLD, Mark.RETAIN} & {*verb.marks}:
        return "its backward has an output of its own"
    if {Mark.TENSOR, Mark.SCALE} <= {*verb.marks}:
        return "tensor and scale exclude each other"
    if act is Act.BACKWARD and not book.kept:
        return "there is no output to go back from"
    if act is Act.STEP and book.pending is not Pending.REDUCED:
        return f"there is {book.pending.value}"
    if act in (Act.SAVE, Act.LOAD) and (book.kept or book.pending is not Pending.NOTHING):
        return "state is saved and loaded between steps, with no output kept"
    if act is Act.LOAD and not book.saved:
        return "nothing was saved"
    if act is Act.INPUT_GRAD:
        return without_input_gradient(layers)
    return ""


def without_input_gradient(layers: Sequence[Layer]) -> str:
    """Why there is no autograd.grad with respect to the inputs of a model."""
    if layers[0].kind is Kind.TOKENS:
        return "token ids have no gradient"
    reentrant = any(layer.kind is Kind.REENTRANT for outer in layers for layer in outer.walk())
    return "torch's reentrant checkpoint takes no autograd.grad" if reentrant else ""


def done(book: Book, verb: Verb) -> Book:
    """What a caller has in hand after ``verb``."""
    act = verb.act
    drawn = book.drawn + (act in (Act.FORWARD, Act.NO_SYNC, Act.NO_GRAD, Act.INFERENCE, Act.INPUT_GRAD))
    if act is Act.FORWARD:
        return replace(book, drawn=drawn, kept=(*book.kept, book.drawn))
    if act is Act.BACKWARD:
        gone = () if Mark.RETAIN in verb.marks else (book.chosen(verb),)
        return replace(book, kept=tuple(m for m in book.kept if m not in gone), pending=Pending.REDUCED)
    if act is Act.NO_SYNC:
        return replace(book, drawn=drawn, pending=Pending.UNREDUCED)
    if act is Act.STEP:
        return replace(book, kept=(), pending=Pending.NOTHING)
    if act is Act.ZERO_GRAD:
        return replace(book, pending=Pending.NOTHING)
    return replace(book, drawn=drawn, saved=book.saved + (act is Act.SAVE))


def played(program: Program) -> Iterator[tuple[int, Verb, Book]]:
    """Every verb with its place, counted from 1, and what the caller has in hand before it."""
    book = Book()
    for place, verb in enumerate(program.verbs, start=1):
        yield place, verb, book
        book = done(book, verb)


_TOKEN = re.compile(r"(?P<close>\])|(?P<name>[a-z]+)(?:\((?P<sizes>[0-9, ]*)\))?(?P<open>\[)?")


def parse(text: str) -> Program:
    """The program that ``text`` writes. Raises UsageError for one that cannot be read, or that is not legal."""
    model, bar, calls = text.partition("|")
    if not bar:
        raise UsageError(f"not a program: {text!r}; expected a model, | and verbs: 'x(3) linear(2) relu | f b s'")
    layers = tuple(parse_layers(model))
    program = Program(layers, tuple(parse_verb(word) for word in calls.split()))
    require_legal(program)
    return program


def require_legal(program: Program) -> None:
    """Raises UsageError unless plain PyTorch could run ``program``."""
    widths = Widths()
    for layer in program.layers:
        widths = behind(widths, layer)
    if not widths.trained:
        raise UsageError(f"{program.model or 'an empty model'}: nothing in it is trained in every micro-batch")
    for place, verb, book in played(program):
        reason = refusal(program.layers, book, verb)
        if reason:
            raise UsageError(f"verb {place} of {words(program.verbs)!r}, {verb}: {reason}")


def parse_layers(text: str) -> list[Layer]:
    """The layers that ``text`` writes, whether or not they fit."""
    stack: list[list[Layer]] = [[]]
    opened: list[Kind] = []
    rest = text.strip()
    while rest:
        found = _TOKEN.match(rest)
        if found is None or (found["close"] and not opened):
            raise UsageError(f"not a model: {text!r}; cannot read {rest!r}, expected layers as in 'x(3) linear(2)'")
        rest = rest[found.end() :].lstrip()
        if found["close"]:
            inner = tuple(stack.pop())
            stack[-1].append(Layer(opened.pop(), (), inner))
            continue
        kind = kind_named(found["name"])
        if bool(found["open"]) != (kind in BLOCKS):
            raise UsageError(f"not a model: {text!r}; expected [ behind {words(k.value for k in BLOCKS)} alone")
        if found["open"]:
            opened.append(kind)
            stack.append([])
        else:
            sizes = found["sizes"] or ""
            stack[-1].append(Layer(kind, tuple(int(size) for size in sizes.split(",") if size.strip())))
    if opened:
        raise UsageError(f"not a model: {text!r}; expected a ] for every [")
    return stack[0]


def kind_named(name: str) -> Kind:
    """The kind of layer of that name. Raises UsageError when there is none."""
    try:
        return Kind(name)
    except ValueError:
        raise UsageError.unknown("layer", name, [kind.value for kind in Kind]) from None


def parse_verb(word: str) -> Verb:
    """One verb with its marks, as in ``b:old,retain``. Raises UsageError for any other word."""
    name, _, marks = word.partition(":")
    try:
        act = Act(name)
    except ValueError:
        raise UsageError.unknown("verb", name, [act.value for act in Act]) from None
    given = [mark for mark in marks.split(",") if mark]
    for mark in given:
        if mark not in {known.value for known in Mark}:
            raise UsageError.unknown(f"mark of {name}", mark, [known.value for known in Mark])
    return Verb(act, tuple(mark for mark in Mark if mark.value in given))
