"""Programs: a small model and an order of calls as frozen data, written and read as one line of text.

``x(3) linear(2) relu | f b:retain b s`` is a model of three inputs, a linear layer with two outputs and a ReLU, and a
caller who runs a forward, two backwards on its graph and a step. What a caller may do is what plain PyTorch allows.
"""

from __future__ import annotations

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
    STEP = "s"  # step, and zero_grad where that was a boundary; outputs that are kept are dropped
    ZERO_GRAD = "z"
    NO_GRAD = "e"  # a forward under no_grad
    INFERENCE = "i"  # a forward under inference_mode
    EVALUATION = "v"  # a forward in eval mode, under no_grad
    EVALUATION_GRAD = "vg"  # a forward in eval mode, of which a graph is recorded that nobody uses
    INPUT_GRAD = "g"  # autograd.grad of a new forward with respect to its inputs
    TRANSFORM = "t"  # torch.func.grad of a new forward with respect to its inputs
    LOOK = "l"  # everything that an engine shows is asked for, twice
    FAILED_FORWARD = "xf"  # an exception halfway through a forward, which the caller catches
    FAILED_BACKWARD = "xb"  # an exception halfway through a backward, which the caller catches, and zero_grad
    IDLE = "idle"  # a step without any gradient
    EDIT = "edit"  # one rank writes a weight, for all
    SAVE = "save"
    LOAD = "load"  # what was saved last


NEW_GRAPH = (Act.FORWARD, Act.NO_SYNC)  # those of the outputs in hand are there as well
DRAWS = (  # those that take a micro-batch
    *(Act.FORWARD, Act.NO_SYNC, Act.NO_GRAD, Act.INFERENCE, Act.EVALUATION, Act.EVALUATION_GRAD),
    *(Act.INPUT_GRAD, Act.TRANSFORM, Act.FAILED_FORWARD, Act.FAILED_BACKWARD),
)
BACKWARDS = (Act.BACKWARD, Act.NO_SYNC, Act.FAILED_BACKWARD)
BETWEEN_STEPS = (Act.SAVE, Act.LOAD, Act.EDIT, Act.IDLE)  # no output is kept, and nothing waits for a step


class Mark(Enum):
    """How it is done, where not as ever: a backward by ``engine.backward``, of the newest output's mean squared error.

    A forward has the whole micro-batch, as a positional argument; a load reads what was saved last.
    """

    OLD = "old"  # of the oldest output that is kept; what was saved first, and over it
    TENSOR = "tensor"  # loss.backward()
    SCALE = "scale"  # engine.scale(loss).backward()
    OTHER = "other"  # another loss of the same output
    RETAIN = "retain"  # the graph is retained, and the output stays
    UNSEEN = "unseen"  # nobody asks for its gradients, unless it is with a look or after another backward
    FEW = "few"  # fewer samples, on each rank another number
    KEYWORD = "kw"  # inputs by keyword


LOSS = (Mark.TENSOR, Mark.SCALE, Mark.OTHER)
INPUTS = (Mark.FEW, Mark.KEYWORD)
MARKED: dict[Act, tuple[Mark, ...]] = {
    Act.FORWARD: INPUTS,
    Act.BACKWARD: (Mark.OLD, *LOSS, Mark.RETAIN, Mark.UNSEEN),
    Act.NO_SYNC: (*LOSS, *INPUTS),  # its backward has an output of its own
    Act.SAVE: (Mark.OLD,),
    Act.LOAD: (Mark.OLD,),
}


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
    """One act; ``marks`` are those that MARKED allows it, in the order of Mark."""

    act: Act
    marks: tuple[Mark, ...] = ()

    def __str__(self) -> str:
        return f"{self.act.value}:{','.join(mark.value for mark in self.marks)}" if self.marks else self.act.value


@dataclass(frozen=True)
class Program:
    """A model, what a caller does with it, and where: one example of all that training may be.

    ``layers`` begin with a source; where there are none, the model is that of the law that plays the program.
    ``optimizer`` is a name of ``zharness.checks.program.OPTIMIZERS``, ``clip`` the norm to which gradients are clipped,
    ``window`` how many micro-batches the engine takes together and divides by, ``reduction`` mean or sum.
    """

    layers: tuple[Layer, ...]
    verbs: tuple[Verb, ...]
    stage: int = 0
    world_size: int = 2
    dtype: str = "fp32"
    optimizer: str = "adamw"
    clip: float | None = None
    window: int = 1
    reduction: str = "mean"

    @property
    def plainly(self) -> Program:
        """The same on an engine that is told of nothing but an optimizer."""
        return replace(self, clip=None, window=1, reduction="mean")

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
    UNSEEN = "gradients, reduced, for which nobody has asked"
    UNREDUCED = "gradients, the last of them under no_sync alone"


@dataclass(frozen=True)
class Book:
    """What a caller has in hand: ``kept`` outputs by their micro-batch, ``drawn`` micro-batches, ``saved`` times.

    ``window`` micro-batches make a step, of which the engine has been told of ``counted``.
    """

    kept: tuple[int, ...] = ()
    drawn: int = 0
    pending: Pending = Pending.NOTHING
    saved: int = 0
    window: int = 1
    counted: int = 0

    @property
    def boundary(self) -> bool:
        """Whether the next step is one, and the gradients before it are whole."""
        return self.counted + 1 == self.window

    @property
    def ready(self) -> bool:
        """Whether there are reduced gradients, for which an engine may be asked."""
        return self.boundary and self.pending in (Pending.REDUCED, Pending.UNSEEN)

    def chosen(self, verb: Verb) -> int:
        """The micro-batch of the output that a backward takes."""
        return self.kept[0 if Mark.OLD in verb.marks else -1]


def refusal(layers: Sequence[Layer], book: Book, verb: Verb) -> str:
    """Why a caller with ``book`` in hand cannot do ``verb``; nothing where plain PyTorch allows it."""
    act = verb.act
    unfit = [mark.value for mark in verb.marks if mark not in MARKED.get(act, ())]
    if unfit:
        return f"it has no mark {', '.join(unfit)}"
    if {Mark.TENSOR, Mark.SCALE} <= {*verb.marks}:
        return "tensor and scale exclude each other"
    if Mark.TENSOR in verb.marks and book.window > 1:
        return "an engine that divides by its micro-batches is told of a backward"
    if act is Act.BACKWARD and not book.kept:
        return "there is no output to go back from"
    if act is Act.STEP and not (book.ready if book.boundary else book.pending is not Pending.NOTHING):
        return f"there is {book.pending.value}"
    if act in BETWEEN_STEPS and (book.kept or book.pending is not Pending.NOTHING or book.counted):
        return "it is done between steps, with no output kept"
    if act is Act.IDLE and book.window > 1:
        return "an engine that counts micro-batches would count one"
    if not book.saved and (act is Act.LOAD or (act is Act.SAVE and Mark.OLD in verb.marks)):
        return "nothing was saved"
    if act in (Act.INPUT_GRAD, Act.TRANSFORM):
        return without_input_gradient(layers)
    return ""


def without_input_gradient(layers: Sequence[Layer]) -> str:
    """Why there is no gradient with respect to the inputs of a model; those of one without layers are floats."""
    if layers and layers[0].kind is Kind.TOKENS:
        return "token ids have no gradient"
    reentrant = any(layer.kind is Kind.REENTRANT for outer in layers for layer in outer.walk())
    return "torch's reentrant checkpoint takes no autograd.grad" if reentrant else ""


def accumulates(book: Book, verb: Verb) -> bool:
    """Whether ``verb`` runs a backward on top of gradients that wait for a step, of which no engine was told."""
    return verb.act in BACKWARDS and book.pending is not Pending.NOTHING and book.window == 1


def done(book: Book, verb: Verb) -> Book:
    """What a caller has in hand after ``verb``."""
    act = verb.act
    book = replace(book, drawn=book.drawn + (act in DRAWS), saved=book.saved + (verb == Verb(Act.SAVE)))
    if act is Act.FORWARD:
        return replace(book, kept=(*book.kept, book.drawn - 1))
    if act is Act.BACKWARD:
        gone = () if Mark.RETAIN in verb.marks else (book.chosen(verb),)
        pending = Pending.UNSEEN if Mark.UNSEEN in verb.marks else Pending.REDUCED
        return replace(book, kept=tuple(m for m in book.kept if m not in gone), pending=pending)
    if act is Act.NO_SYNC:
        return replace(book, pending=Pending.UNREDUCED)
    if act is Act.LOOK and book.ready:
        return replace(book, pending=Pending.REDUCED)
    if act is Act.STEP:
        return replace(book, kept=(), pending=Pending.NOTHING, counted=(book.counted + 1) % book.window)
    if act in (Act.ZERO_GRAD, Act.FAILED_BACKWARD):
        return replace(book, pending=Pending.NOTHING, counted=0)
    return book


def played(program: Program) -> Iterator[tuple[int, Verb, Book]]:
    """Every verb with its place, counted from 1, and what the caller has in hand before it."""
    book = Book(window=program.window)
    for place, verb in enumerate(program.verbs, start=1):
        yield place, verb, book
        book = done(book, verb)
