"""Define programs: a small model and a sequence of calls (verbs). A program can be written as one line of text.

``x(3) linear(2) relu | f b:retain b s`` is a model with three inputs, a linear layer with two outputs and a ReLU, whose
caller runs a forward, two backwards on its graph and a step. A program is legal if plain PyTorch can run it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from zharness.mesh import DEFAULT_MESH, Mesh


class LayerKind(Enum):
    """The kinds of layers. ``x`` and ``tokens`` begin a model; all others map (samples, width) to (samples, width)."""

    INPUTS = "x"  # x(width): float inputs
    TOKENS = "tokens"  # tokens(vocabulary, width): token ids and an embedding
    LINEAR = "linear"  # linear(outputs)
    MATRIX = "matrix"  # matrix(outputs): a linear layer without bias
    FROZEN = "frozen"  # frozen(outputs): a linear layer that is not trained
    READ = "read"  # read(outputs): a matrix whose module is never called; the forward reads its weight
    TIED = "tied"  # uses the weight of the nearest earlier layer that fits
    CONV = "conv"  # conv(channels): a convolution along the width
    NORM = "norm"
    RELU = "relu"
    GELU = "gelu"
    UNUSED = "unused"  # unused(elements): a parameter that the forward does not use
    RESIDUAL = "residual"  # residual[...]: adds the output of the inner layers to their input
    TWICE = "twice"  # twice[...]: calls the inner layers twice
    CHECKPOINT = "checkpoint"  # checkpoint[...]: recomputes the inner layers in backward
    REENTRANT = "reentrant"  # reentrant[...]: recomputes the inner layers by torch's older use_reentrant=True
    SOMETIMES = "sometimes"  # sometimes[...]: uses the inner layers only in every second micro-batch


SOURCE_KINDS = (LayerKind.INPUTS, LayerKind.TOKENS)
SIZED_KINDS = (LayerKind.LINEAR, LayerKind.MATRIX, LayerKind.FROZEN, LayerKind.READ, LayerKind.CONV, LayerKind.UNUSED)
BLOCK_KINDS = (LayerKind.RESIDUAL, LayerKind.TWICE, LayerKind.CHECKPOINT, LayerKind.REENTRANT, LayerKind.SOMETIMES)
# Blocks whose inner layers must end with the width that they begin with.
WIDTH_PRESERVING_KINDS = (LayerKind.RESIDUAL, LayerKind.TWICE, LayerKind.SOMETIMES)
TRAINED_KINDS = (
    LayerKind.TOKENS,
    LayerKind.LINEAR,
    LayerKind.MATRIX,
    LayerKind.READ,
    LayerKind.TIED,
    LayerKind.CONV,
    LayerKind.NORM,
)
# The number of sizes that a layer of each kind has; all other kinds have none.
SIZE_COUNTS = {LayerKind.TOKENS: 2, LayerKind.INPUTS: 1, **dict.fromkeys(SIZED_KINDS, 1)}


class Act(Enum):
    """The kinds of calls that a program can make. Every forward uses a new micro-batch."""

    FORWARD = "f"  # a forward whose output is kept
    BACKWARD = "b"  # a backward from the newest kept output
    NO_SYNC = "n"  # forward and backward of one micro-batch inside no_sync
    STEP = "s"  # step, and zero_grad at an accumulation boundary; kept outputs are dropped
    ZERO_GRAD = "z"
    NO_GRAD = "e"  # a forward under no_grad
    INFERENCE = "i"  # a forward under inference_mode
    EVALUATION = "v"  # a forward in eval mode, under no_grad
    EVALUATION_GRAD = "vg"  # a forward in eval mode that records a graph, without a backward
    INPUT_GRAD = "g"  # autograd.grad of a new forward with respect to its inputs
    TRANSFORM = "t"  # torch.func.grad of a new forward with respect to its inputs
    LOOK = "l"  # read all tensors and observations of the engine, twice
    FAILED_FORWARD = "xf"  # a forward that raises halfway; the caller catches the exception
    FAILED_BACKWARD = "xb"  # a backward that raises halfway; the caller catches the exception and calls zero_grad
    IDLE = "idle"  # a step without gradients
    EDIT = "edit"  # rank 0 writes a weight, for all ranks
    SAVE = "save"
    LOAD = "load"  # load the last checkpoint


GRAPH_ACTS = (Act.FORWARD, Act.NO_SYNC)  # acts that make a graph in addition to those of the kept outputs
MICRO_BATCH_ACTS = (  # acts that take a micro-batch
    *(Act.FORWARD, Act.NO_SYNC, Act.NO_GRAD, Act.INFERENCE, Act.EVALUATION, Act.EVALUATION_GRAD),
    *(Act.INPUT_GRAD, Act.TRANSFORM, Act.FAILED_FORWARD, Act.FAILED_BACKWARD),
)
BACKWARD_ACTS = (Act.BACKWARD, Act.NO_SYNC, Act.FAILED_BACKWARD)
BETWEEN_STEPS_ACTS = (
    Act.SAVE,
    Act.LOAD,
    Act.EDIT,
    Act.IDLE,
)  # acts that are legal only if no output is kept and no gradient waits for a step


class Mark(Enum):
    """The options of a call, of which a verb may have several.

    By default a backward is ``engine.backward`` of the mean squared error of the newest output, a forward takes the
    whole micro-batch as a positional argument, and a load reads the last checkpoint.
    """

    OLD = "old"  # backward: of the oldest kept output; save and load: the first checkpoint, which save overwrites
    TENSOR = "tensor"  # loss.backward()
    SCALE = "scale"  # engine.scale(loss).backward()
    OTHER = "other"  # a different loss of the same output
    RETAIN = "retain"  # retain_graph=True; the output stays kept
    UNSEEN = "unseen"  # full_grads is not called after this backward
    FEW = "few"  # fewer samples, a different number on each rank
    KEYWORD = "kw"  # inputs by keyword


LOSS_MARKS = (Mark.TENSOR, Mark.SCALE, Mark.OTHER)
INPUT_MARKS = (Mark.FEW, Mark.KEYWORD)
ALLOWED_MARKS: dict[Act, tuple[Mark, ...]] = {
    Act.FORWARD: INPUT_MARKS,
    Act.BACKWARD: (Mark.OLD, *LOSS_MARKS, Mark.RETAIN, Mark.UNSEEN),
    Act.NO_SYNC: (*LOSS_MARKS, *INPUT_MARKS),  # its backward uses the output of its own forward
    Act.SAVE: (Mark.OLD,),
    Act.LOAD: (Mark.OLD,),
}


@dataclass(frozen=True)
class Layer:
    """A layer of the model that a program runs on.

    ``sizes`` are the layer's integer arguments, such as the outputs of ``linear(outputs)``; LayerKind lists them.
    ``inner`` are the inner layers of a block; all other layers have none.
    """

    kind: LayerKind
    sizes: tuple[int, ...] = ()
    inner: tuple[Layer, ...] = ()

    def __str__(self) -> str:
        sizes = f"({','.join(map(str, self.sizes))})" if self.sizes else ""
        inner = f"[{join_words(self.inner)}]" if self.kind in BLOCK_KINDS else ""
        return f"{self.kind.value}{sizes}{inner}"

    def walk(self) -> Iterator[Layer]:
        """Yield this layer and all layers inside it."""
        yield self
        for layer in self.inner:
            yield from layer.walk()


@dataclass(frozen=True)
class Verb:
    """A call that a program makes: the kind of call (``act``) and its options (``marks``).

    The marks are in the order of the members of Mark; ALLOWED_MARKS lists the marks that each act may have.
    """

    act: Act
    marks: tuple[Mark, ...] = ()

    def __str__(self) -> str:
        return f"{self.act.value}:{','.join(mark.value for mark in self.marks)}" if self.marks else self.act.value


ENGINE, CALLER = "engine", "caller"  # who may own an accumulation window


@dataclass(frozen=True)
class Program:
    """A small model, a sequence of calls on it, and the settings of the engine.

    - ``layers`` begin with ``x`` or ``tokens``. If ``layers`` is empty, the law provides the model.
    - ``verbs`` are the calls, in order.
    - ``optimizer`` is a key of ``zharness.law_kit.program_steps.OPTIMIZERS``.
    - ``clip`` is the norm to which gradients are clipped, or None for no clipping.
    - ``window`` is the number of micro-batches per step. ``window_owner``, ``engine`` or ``caller``, counts them and
      divides by their number.
    - ``reduction`` is ``mean`` or ``sum``.
    - ``options`` are names of options of the engine, which it claims.
    - ``mesh`` has the axes beside data parallelism, which copy weights and split no layer.
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
    window_owner: str = ENGINE
    options: tuple[str, ...] = ()
    mesh: Mesh = DEFAULT_MESH

    @property
    def caller_divisor(self) -> int:
        """The number by which the caller divides its losses: ``window`` if the caller owns the window, otherwise 1."""
        return self.window if self.window_owner == CALLER else 1

    @property
    def with_default_settings(self) -> Program:
        """A copy of the program without gradient clipping and accumulation, and with mean reduction."""
        return replace(self, clip=None, window=1, window_owner=ENGINE, reduction="mean")

    @property
    def model(self) -> str:
        """The text of the model, from which the seed of the model's batches is derived."""
        return join_words(self.layers)

    def __str__(self) -> str:
        return f"{self.model} | {join_words(self.verbs)}".rstrip()

    def walk(self) -> Iterator[Layer]:
        """Yield every layer of the model, including the layers inside blocks."""
        for layer in self.layers:
            yield from layer.walk()


def join_words(items: Iterable[object]) -> str:
    """Convert ``items`` to strings and join them with spaces."""
    return " ".join(map(str, items))


class PendingGradients(Enum):
    """The states that the gradients since the last step or zero_grad can have between two verbs."""

    NOTHING = "there is no gradient"
    REDUCED = "the gradients are reduced"
    UNSEEN = "the gradients are reduced, and have not been read"
    UNREDUCED = "the last gradients are not reduced, because their backward ran in no_sync"


@dataclass(frozen=True)
class CallerState:
    """The state, between two verbs, of the code that calls the engine.

    ``outputs`` lists the micro-batch number of each kept output. ``pending`` is the state of the gradients. ``window``
    is the number of micro-batches in an accumulation window, and ``micro_batches_counted`` says how many of them
    ``window_owner`` has counted: the engine counts calls of ``step``, the caller counts backwards.
    ``micro_batches_drawn`` and ``save_count`` count from the start of the program.
    """

    outputs: tuple[int, ...] = ()
    micro_batches_drawn: int = 0
    pending: PendingGradients = PendingGradients.NOTHING
    save_count: int = 0
    window: int = 1
    micro_batches_counted: int = 0
    window_owner: str = ENGINE

    @property
    def is_boundary(self) -> bool:
        """Whether the next step is an accumulation boundary, so that gradients are complete before it."""
        return self.micro_batches_counted + (not self.is_window_of_caller) == self.window

    @property
    def is_window_of_caller(self) -> bool:
        """Whether the caller accumulates several micro-batches, and divides their losses."""
        return self.window > 1 and self.window_owner == CALLER

    @property
    def has_reduced_gradients(self) -> bool:
        """Whether reduced gradients exist that the caller may read with ``full_grads``."""
        return self.is_boundary and self.pending in (PendingGradients.REDUCED, PendingGradients.UNSEEN)

    def select_output(self, verb: Verb) -> int:
        """Return the number of the micro-batch whose output is differentiated by the backward ``verb``."""
        return self.outputs[0 if Mark.OLD in verb.marks else -1]


def explain_illegal_verb(layers: Sequence[Layer], caller: CallerState, verb: Verb) -> str:
    """Return the reason why ``verb`` is illegal in the state ``caller``, or '' if plain PyTorch allows the verb."""
    act = verb.act
    forbidden = [mark.value for mark in verb.marks if mark not in ALLOWED_MARKS.get(act, ())]
    if forbidden:
        return f"this verb cannot have the mark {', '.join(forbidden)}"
    if {Mark.TENSOR, Mark.SCALE} <= {*verb.marks}:
        return "a verb cannot have both the mark tensor and the mark scale"
    if Mark.TENSOR in verb.marks and caller.window > 1:
        return "with a window above 1, the engine divides losses, so backward needs engine.backward or engine.scale"
    if act is Act.BACKWARD and not caller.outputs:
        return "no output is kept for a backward"
    if caller.is_window_of_caller:
        left = caller.window - caller.micro_batches_counted
        if act is Act.STEP and left:
            return f"the caller's window lacks {left} backwards"
        if (act in BACKWARD_ACTS and not left) or (act is Act.NO_SYNC and left == 1):
            return "the last backward of the caller's window has to reduce the gradients, and a step has to follow"
    if act is Act.STEP and not (
        caller.has_reduced_gradients if caller.is_boundary else caller.pending is not PendingGradients.NOTHING
    ):
        return caller.pending.value
    if act in BETWEEN_STEPS_ACTS and (
        caller.outputs or caller.pending is not PendingGradients.NOTHING or caller.micro_batches_counted
    ):
        return "this verb is allowed only between steps, without gradients and without outputs kept for a backward"
    if act is Act.IDLE and caller.window > 1:
        return "an engine that counts micro-batches would count this step"
    if not caller.save_count and (act is Act.LOAD or (act is Act.SAVE and Mark.OLD in verb.marks)):
        return "no checkpoint was saved before"
    if act in (Act.INPUT_GRAD, Act.TRANSFORM):
        return explain_missing_input_gradient(layers, act)
    return ""


def explain_missing_input_gradient(layers: Sequence[Layer], act: Act) -> str:
    """Return why a program cannot differentiate with respect to its model's inputs by ``act``, or '' if it can.

    If ``layers`` is empty, a law provides the model, whose inputs are floats.
    """
    if layers and layers[0].kind is LayerKind.TOKENS:
        return "token ids have no gradient"
    kinds = {layer.kind for outer in layers for layer in outer.walk()}
    if LayerKind.REENTRANT in kinds:
        return "torch's reentrant checkpoint does not support autograd.grad"
    if LayerKind.CHECKPOINT in kinds and act is Act.TRANSFORM:
        return "torch.func does not support the saved-tensor hooks of torch's checkpoint"
    return ""


def is_accumulating(caller: CallerState, verb: Verb) -> bool:
    """Return whether ``verb`` is a backward that adds to gradients that wait for a step.

    The result is False if the accumulation window has several micro-batches, which accumulate gradients in any case.
    """
    return verb.act in BACKWARD_ACTS and caller.pending is not PendingGradients.NOTHING and caller.window == 1


def apply_verb(caller: CallerState, verb: Verb) -> CallerState:
    """Return the state that the caller has after ``verb``."""
    act = verb.act
    caller = replace(
        caller,
        micro_batches_drawn=caller.micro_batches_drawn + (act in MICRO_BATCH_ACTS),
        save_count=caller.save_count + (verb == Verb(Act.SAVE)),
        micro_batches_counted=caller.micro_batches_counted + (caller.is_window_of_caller and act in BACKWARD_ACTS),
    )
    if act is Act.FORWARD:
        return replace(caller, outputs=(*caller.outputs, caller.micro_batches_drawn - 1))
    if act is Act.BACKWARD:
        consumed = () if Mark.RETAIN in verb.marks else (caller.select_output(verb),)
        pending = PendingGradients.UNSEEN if Mark.UNSEEN in verb.marks else PendingGradients.REDUCED
        return replace(caller, outputs=tuple(m for m in caller.outputs if m not in consumed), pending=pending)
    if act is Act.NO_SYNC:
        return replace(caller, pending=PendingGradients.UNREDUCED)
    if act is Act.LOOK and caller.has_reduced_gradients:
        return replace(caller, pending=PendingGradients.REDUCED)
    if act is Act.STEP:
        return replace(
            caller,
            outputs=(),
            pending=PendingGradients.NOTHING,
            micro_batches_counted=0 if caller.is_boundary else caller.micro_batches_counted + 1,
        )
    if act in (Act.ZERO_GRAD, Act.FAILED_BACKWARD):
        return replace(caller, pending=PendingGradients.NOTHING, micro_batches_counted=0)
    return caller


def iter_verbs(program: Program) -> Iterator[tuple[int, Verb, CallerState]]:
    """Yield a tuple for each verb: its number (from 1), the verb, and the state of the caller before the verb."""
    caller = CallerState(window=program.window, window_owner=program.window_owner)
    for number, verb in enumerate(program.verbs, start=1):
        yield number, verb, caller
        caller = apply_verb(caller, verb)
