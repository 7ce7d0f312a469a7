"""Programs: a small model and an order of calls as frozen data, written and read as one line of text.

``x(3) linear(2) relu | f b:retain b s`` is a model of three inputs, a linear layer with two outputs and a ReLU, and a
caller who runs a forward, two backwards on its graph and a step. What a caller may do is what plain PyTorch allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from zharness.errors import UsageError

WeightShape = tuple[int, int]  # outputs and inputs of a weight


class LayerKind(Enum):
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


SOURCE_KINDS = (LayerKind.INPUTS, LayerKind.TOKENS)
SIZED_KINDS = (LayerKind.LINEAR, LayerKind.MATRIX, LayerKind.FROZEN, LayerKind.READ, LayerKind.CONV, LayerKind.UNUSED)
BLOCK_KINDS = (LayerKind.RESIDUAL, LayerKind.TWICE, LayerKind.CHECKPOINT, LayerKind.REENTRANT, LayerKind.SOMETIMES)
WIDTH_PRESERVING_KINDS = (
    LayerKind.RESIDUAL,
    LayerKind.TWICE,
    LayerKind.SOMETIMES,
)  # of the blocks, those that need what they end with
TRAINED_KINDS = (
    LayerKind.TOKENS,
    LayerKind.LINEAR,
    LayerKind.MATRIX,
    LayerKind.READ,
    LayerKind.TIED,
    LayerKind.CONV,
    LayerKind.NORM,
)
SIZE_COUNTS = {
    LayerKind.TOKENS: 2,
    LayerKind.INPUTS: 1,
    **dict.fromkeys(SIZED_KINDS, 1),
}  # sizes that a layer is written with


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


GRAPH_ACTS = (Act.FORWARD, Act.NO_SYNC)  # those of the outputs in hand are there as well
MICRO_BATCH_ACTS = (  # those that take a micro-batch
    *(Act.FORWARD, Act.NO_SYNC, Act.NO_GRAD, Act.INFERENCE, Act.EVALUATION, Act.EVALUATION_GRAD),
    *(Act.INPUT_GRAD, Act.TRANSFORM, Act.FAILED_FORWARD, Act.FAILED_BACKWARD),
)
BACKWARD_ACTS = (Act.BACKWARD, Act.NO_SYNC, Act.FAILED_BACKWARD)
BETWEEN_STEPS_ACTS = (Act.SAVE, Act.LOAD, Act.EDIT, Act.IDLE)  # no output is kept, and nothing waits for a step


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


LOSS_MARKS = (Mark.TENSOR, Mark.SCALE, Mark.OTHER)
INPUT_MARKS = (Mark.FEW, Mark.KEYWORD)
ALLOWED_MARKS: dict[Act, tuple[Mark, ...]] = {
    Act.FORWARD: INPUT_MARKS,
    Act.BACKWARD: (Mark.OLD, *LOSS_MARKS, Mark.RETAIN, Mark.UNSEEN),
    Act.NO_SYNC: (*LOSS_MARKS, *INPUT_MARKS),  # its backward has an output of its own
    Act.SAVE: (Mark.OLD,),
    Act.LOAD: (Mark.OLD,),
}


@dataclass(frozen=True)
class Layer:
    """One layer; ``sizes`` as its kind says, ``inner`` for blocks alone."""

    kind: LayerKind
    sizes: tuple[int, ...] = ()
    inner: tuple[Layer, ...] = ()

    def __str__(self) -> str:
        sizes = f"({','.join(map(str, self.sizes))})" if self.sizes else ""
        inner = f"[{join_words(self.inner)}]" if self.kind in BLOCK_KINDS else ""
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
    ``optimizer`` is a name of ``zharness.law_kit.program_executor.OPTIMIZERS``, ``clip`` the norm to which gradients are clipped,
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
    def with_default_settings(self) -> Program:
        """The same on an engine that is told of nothing but an optimizer."""
        return replace(self, clip=None, window=1, reduction="mean")

    @property
    def model(self) -> str:
        """The model as text; it names the model's batches too."""
        return join_words(self.layers)

    def __str__(self) -> str:
        return f"{self.model} | {join_words(self.verbs)}".rstrip()

    def walk(self) -> Iterator[Layer]:
        """Every layer, those within blocks too."""
        for layer in self.layers:
            yield from layer.walk()


def join_words(items: Iterable[object]) -> str:
    """Their texts, with spaces between."""
    return " ".join(map(str, items))


@dataclass(frozen=True)
class ModelShape:
    """What is known behind some layers: the width, the weights that may be tied, whether a gradient flows back."""

    width: int = 0
    weights: tuple[WeightShape, ...] = ()
    trained_count: int = 0

    def find_tieable_weight(self) -> WeightShape | None:
        """The nearest weight that a tied layer could use."""
        return next((shape for shape in reversed(self.weights) if shape[1] == self.width), None)


def shape_after_layer(model_shape: ModelShape, layer: Layer) -> ModelShape:
    """What is known behind ``layer``. Raises UsageError where the layer cannot stand there."""
    kind, sizes, width = layer.kind, layer.sizes, model_shape.width
    if len(sizes) != SIZE_COUNTS.get(kind, 0) or not all(size > 0 for size in sizes):
        raise UsageError(f"{layer}: expected {SIZE_COUNTS.get(kind, 0)} sizes above 0 for {kind.value}")
    if (kind in SOURCE_KINDS) != (width == 0):
        raise UsageError(f"{layer}: a model begins with {' or '.join(k.value for k in SOURCE_KINDS)}, and only there")
    after = replace(model_shape, trained_count=model_shape.trained_count + (kind in TRAINED_KINDS))
    if kind in BLOCK_KINDS:
        return shape_after_block(model_shape, layer)
    if kind is LayerKind.INPUTS:
        return replace(after, width=sizes[0])
    if kind is LayerKind.TOKENS:
        return replace(after, width=sizes[1], weights=((sizes[0], sizes[1]),))
    if kind in (LayerKind.LINEAR, LayerKind.MATRIX):
        return replace(after, width=sizes[0], weights=(*model_shape.weights, (sizes[0], width)))
    if kind in (LayerKind.FROZEN, LayerKind.READ):
        return replace(after, width=sizes[0])
    if kind is LayerKind.CONV:
        return replace(after, width=sizes[0] * width)
    if kind is LayerKind.TIED:
        shape = model_shape.find_tieable_weight()
        if shape is None:
            raise UsageError(f"tied: no linear, matrix or tokens before has a weight for {width} inputs")
        return replace(after, width=shape[0])
    return after


def shape_after_block(model_shape: ModelShape, block: Layer) -> ModelShape:
    """``behind`` for a layer with layers inside."""
    after = model_shape
    for layer in block.inner:
        after = shape_after_layer(after, layer)
    if block.kind in WIDTH_PRESERVING_KINDS and after.width != model_shape.width:
        raise UsageError(
            f"{block}: it ends with width {after.width}, and has to end with {model_shape.width} as it begins"
        )
    if block.kind is LayerKind.REENTRANT and not model_shape.trained_count:
        raise UsageError(f"{block}: nothing before it is trained, so torch would give it no gradients")
    # What is left out in every second micro-batch alone gives no gradient to rely on.
    return replace(after, trained_count=model_shape.trained_count) if block.kind is LayerKind.SOMETIMES else after


class PendingGradients(Enum):
    """What has become of the gradients since the last step or zero_grad."""

    NOTHING = "no gradient"
    REDUCED = "gradients, reduced"
    UNSEEN = "gradients, reduced, for which nobody has asked"
    UNREDUCED = "gradients, the last of them under no_sync alone"


@dataclass(frozen=True)
class CallerState:
    """What a caller has in hand: ``kept`` outputs by their micro-batch, ``drawn`` micro-batches, ``saved`` times.

    ``window`` micro-batches make a step, of which the engine has been told of ``counted``.
    """

    outputs: tuple[int, ...] = ()
    micro_batches_drawn: int = 0
    pending: PendingGradients = PendingGradients.NOTHING
    save_count: int = 0
    window: int = 1
    micro_batches_counted: int = 0

    @property
    def is_boundary(self) -> bool:
        """Whether the next step is one, and the gradients before it are whole."""
        return self.micro_batches_counted + 1 == self.window

    @property
    def has_reduced_gradients(self) -> bool:
        """Whether there are reduced gradients, for which an engine may be asked."""
        return self.is_boundary and self.pending in (PendingGradients.REDUCED, PendingGradients.UNSEEN)

    def select_output(self, verb: Verb) -> int:
        """The micro-batch of the output that a backward takes."""
        return self.outputs[0 if Mark.OLD in verb.marks else -1]


def explain_illegal_verb(layers: Sequence[Layer], caller: CallerState, verb: Verb) -> str:
    """Why a caller with ``book`` in hand cannot do ``verb``; nothing where plain PyTorch allows it."""
    act = verb.act
    unfit = [mark.value for mark in verb.marks if mark not in ALLOWED_MARKS.get(act, ())]
    if unfit:
        return f"it has no mark {', '.join(unfit)}"
    if {Mark.TENSOR, Mark.SCALE} <= {*verb.marks}:
        return "tensor and scale exclude each other"
    if Mark.TENSOR in verb.marks and caller.window > 1:
        return "an engine that divides by its micro-batches is told of a backward"
    if act is Act.BACKWARD and not caller.outputs:
        return "there is no output to go back from"
    if act is Act.STEP and not (
        caller.has_reduced_gradients if caller.is_boundary else caller.pending is not PendingGradients.NOTHING
    ):
        return f"there is {caller.pending.value}"
    if act in BETWEEN_STEPS_ACTS and (
        caller.outputs or caller.pending is not PendingGradients.NOTHING or caller.micro_batches_counted
    ):
        return "it is done between steps, with no output kept"
    if act is Act.IDLE and caller.window > 1:
        return "an engine that counts micro-batches would count one"
    if not caller.save_count and (act is Act.LOAD or (act is Act.SAVE and Mark.OLD in verb.marks)):
        return "nothing was saved"
    if act in (Act.INPUT_GRAD, Act.TRANSFORM):
        return explain_missing_input_gradient(layers)
    return ""


def explain_missing_input_gradient(layers: Sequence[Layer]) -> str:
    """Why there is no gradient with respect to the inputs of a model; those of one without layers are floats."""
    if layers and layers[0].kind is LayerKind.TOKENS:
        return "token ids have no gradient"
    reentrant = any(layer.kind is LayerKind.REENTRANT for outer in layers for layer in outer.walk())
    return "torch's reentrant checkpoint takes no autograd.grad" if reentrant else ""


def is_accumulating(caller: CallerState, verb: Verb) -> bool:
    """Whether ``verb`` runs a backward on top of gradients that wait for a step, of which no engine was told."""
    return verb.act in BACKWARD_ACTS and caller.pending is not PendingGradients.NOTHING and caller.window == 1


def apply_verb(caller: CallerState, verb: Verb) -> CallerState:
    """What a caller has in hand after ``verb``."""
    act = verb.act
    caller = replace(
        caller,
        micro_batches_drawn=caller.micro_batches_drawn + (act in MICRO_BATCH_ACTS),
        save_count=caller.save_count + (verb == Verb(Act.SAVE)),
    )
    if act is Act.FORWARD:
        return replace(caller, outputs=(*caller.outputs, caller.micro_batches_drawn - 1))
    if act is Act.BACKWARD:
        gone = () if Mark.RETAIN in verb.marks else (caller.select_output(verb),)
        pending = PendingGradients.UNSEEN if Mark.UNSEEN in verb.marks else PendingGradients.REDUCED
        return replace(caller, outputs=tuple(m for m in caller.outputs if m not in gone), pending=pending)
    if act is Act.NO_SYNC:
        return replace(caller, pending=PendingGradients.UNREDUCED)
    if act is Act.LOOK and caller.has_reduced_gradients:
        return replace(caller, pending=PendingGradients.REDUCED)
    if act is Act.STEP:
        return replace(
            caller,
            outputs=(),
            pending=PendingGradients.NOTHING,
            micro_batches_counted=(caller.micro_batches_counted + 1) % caller.window,
        )
    if act in (Act.ZERO_GRAD, Act.FAILED_BACKWARD):
        return replace(caller, pending=PendingGradients.NOTHING, micro_batches_counted=0)
    return caller


def iter_verbs(program: Program) -> Iterator[tuple[int, Verb, CallerState]]:
    """Every verb with its place, counted from 1, and what the caller has in hand before it."""
    book = CallerState(window=program.window)
    for place, verb in enumerate(program.verbs, start=1):
        yield place, verb, book
        book = apply_verb(book, verb)
