"""The Engine protocol: the verbs through which every engine is tested, and the frozen facts that describe one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn


class AccumulationOwner(Enum):
    """Who divides by the number of micro-batches and decides where the boundary is."""

    ENGINE = "engine"
    CALLER = "caller"


class Reduction(Enum):
    """How the ranks' gradients are combined."""

    MEAN = "mean"
    SUM = "sum"


class Feature(Enum):
    """What an engine may or may not claim; a claim is tested, the absence of one needs a reason."""

    ENGINE_BACKWARD = "engine.backward(loss)"
    TENSOR_BACKWARD = "loss.backward()"
    SCALE_BACKWARD = "engine.scale(loss).backward()"
    RETAIN_GRAPH = "a second backward on a retained graph"
    TORCH_FUNC = "torch.func transforms of the engine"
    ENGINE_ACCUMULATION = "accumulation divided and bounded by the engine"
    CALLER_ACCUMULATION = "accumulation divided and bounded by the caller"
    NO_SYNC = "local accumulation without reduction"
    SUM = "gradients summed over ranks"
    CLIP = "clipping by the global norm"
    PARAM_GROUPS = "several parameter groups"
    SCHEDULE = "a learning-rate schedule"
    CHECKPOINT = "save and load"
    RANK_BUFFERS = "buffers saved and loaded by each rank for itself"
    RESHARD = "a checkpoint of one stage loaded at every other"
    UNIVERSAL_CHECKPOINT = "reading DeepSpeed's universal checkpoints"
    AUTOGRAD = "every way in which torch runs a backward"
    TRANSFORMS = "every transform of torch.func, from outside and from within the model"
    RECOMPUTATION = "activation checkpointing"
    PARAMETERS = "parameters of every kind"
    OUTSIDE_FORWARD = "weights read outside the model's own forward"
    SUBMODULES = "submodules called outside the model's own forward"
    NO_GRADIENT = "no gradient, rather than zeros, for a parameter that no rank used"
    SPARSE_GRADIENTS = "gradients that a backward makes sparse"
    OWN_WEIGHT_GRADIENTS = "autograd.grad of weights: this rank's own gradients, to be differentiated again"
    REDUCED_WEIGHT_GRADIENTS = "autograd.grad of weights: the reduced gradients' shards, to be differentiated again"
    UNFREEZING = "parameters unfrozen after construction"
    EDITS = "full weights edited by one rank and seen by all"
    DEFERRED = "a model built on the meta device"
    AUTOCAST = "a section under which forwards run in torch.autocast's dtypes"
    LOSS_SCALER = "a dynamic loss scale, and steps skipped at an overflow"
    AUTOCAST_SCALER = "a dynamic loss scale under torch_autocast in fp16"
    MASTERS = "masters, gradients and optimizer state in the dtype that is asked for"
    WIRES = "a wire in the dtype that is asked for, counted by the engine"
    VARIATIONS = "training told by varying one thing"
    VARIANTS = "options that must not change a number, by name"
    STEADINESS = "a process left as it was found, and no memory read before it is written"
    RESOURCES = "bytes held by this rank, counted by the engine"
    TRAFFIC = "bytes sent and gathered, counted by the engine"


@dataclass(frozen=True)
class Capabilities:
    """What an engine claims.

    Every feature without an entry in ``refuses`` is claimed; the entry is the reason, in the engine's own words where
    it has any. ``own_kernels`` maps a stage to the reason why local gradients there do not come from torch's kernels
    (then only exact arithmetic and tier C can judge them). ``wires`` maps a dtype to the one in which gradients of such
    a training are reduced, where that is another: it sets the bound that the reduction is held to. ``variants`` are
    further options of the engine, by name, that must not change a number. ``absent`` says why the engine cannot be
    built here at all, where it cannot: then no cell is run. ``own_model`` are options for a model of anyone's.
    ``junctions(model, options)`` are the modules of a plain model at whose inputs the engine puts a node into
    autograd's graph, by which gradients are added in another order than the plain model's. ``scaled_sum`` says where a
    sum over ranks is their mean times their number, which rounds unless that is a power of two.
    """

    stages: frozenset[int]
    dtypes: frozenset[str] = frozenset({"fp32"})
    refuses: Mapping[Feature, str] = field(default_factory=dict)
    own_kernels: Mapping[int, str] = field(default_factory=dict)
    wires: Mapping[str, str] = field(default_factory=dict)
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    absent: str = ""
    own_model: Mapping[str, Any] = field(default_factory=dict)
    junctions: Callable[[nn.Module, Mapping[str, Any]], Sequence[nn.Module]] | None = None
    scaled_sum: str = ""

    def refusal(self, feature: Feature) -> str | None:
        """Why ``feature`` is not claimed; None when it is."""
        if feature is Feature.VARIANTS and not self.variants:
            return "it names none"
        return self.refuses.get(feature)


@dataclass(frozen=True)
class GroupSpec:
    """A parameter group: the parameters whose name matches the glob ``pattern``, with these overrides."""

    pattern: str
    overrides: Mapping[str, Any]


@dataclass(frozen=True)
class OptimizerSpec:
    """A torch.optim optimizer by name, its arguments, its groups, and a factor on the learning rate for each step.

    Parameters that match no group form the first group, with ``args`` alone. ``schedule[t]`` multiplies every group's
    learning rate in step t; the last factor holds for all later steps.
    """

    name: str = "sgd"
    args: Mapping[str, Any] = field(default_factory=lambda: {"lr": 1.0})
    groups: tuple[GroupSpec, ...] = ()
    schedule: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class EngineConfig:
    """Everything a check may ask of an engine; the same object configures the baseline.

    ``dtype`` is that of parameters, gradients and wire: under bf16 and fp16 the optimizer works on fp32 masters, and
    under fp16 ``loss_scale`` is the static loss scale.
    """

    stage: int = 0
    dtype: str = "fp32"
    micro_batch_size: int = 1
    accumulation_steps: int = 1
    accumulation_owner: AccumulationOwner = AccumulationOwner.CALLER
    reduction: Reduction = Reduction.MEAN
    clip: float | None = None
    loss_scale: float = 1.0
    optimizer: OptimizerSpec = OptimizerSpec()
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Absent:
    """An observation that an engine does not offer, and why."""

    reason: str


@dataclass(frozen=True)
class Resources:
    """Bytes allocated on this rank for parameters, gathered copies of them included, gradients and optimizer state."""

    parameters: int
    gradients: int
    optimizer_state: int


@dataclass(frozen=True)
class Traffic:
    """Bytes on this rank that were asked of the collectives.

    ``sent`` is what this rank had to send since the engine was made: full bytes x passes x (N-1)/N of each collective.
    ``peak_gathered`` is the most that gathered copies of sharded parameters ever took.
    """

    sent: float
    peak_gathered: int


@dataclass(frozen=True)
class Observations:
    """What an engine says about itself between steps; identical on all ranks. Asking is collective.

    ``gathered_bytes`` are those of gathered copies of sharded parameters that are alive now. ``wire`` counts elements
    sent since the engine was made, by collective and dtype: ``"reduce_scatter bfloat16"``. ``masters`` are the weights
    that the optimizer works on, where those are not the parameters themselves.
    """

    loss_scale: float | Absent
    skipped_steps: int | Absent
    learning_rates: tuple[float, ...] | Absent
    gathered_bytes: int | Absent = Absent("the engine does not count them")
    wire: Mapping[str, int] | Absent = Absent("the engine does not count them")
    masters: Mapping[str, Tensor] | Absent = Absent("the optimizer works on the parameters themselves")
    resources: Resources | Absent = Absent("the engine does not count them")
    traffic: Traffic | Absent = Absent("the engine does not count it")


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``stop`` (flat, of the original tensor) live on ``rank``."""

    rank: int
    start: int
    stop: int


@runtime_checkable
class Engine(Protocol):
    """A training engine that holds ``module`` on this rank. Constructed on every rank, default process group ready.

    Dictionaries of tensors use the original parameter names and shapes, on CPU, identical on every rank; tied
    parameters appear once, under the name that ``named_parameters()`` of the original gives them. They are copies,
    which the caller may write over. Methods that return such dictionaries are collective.
    """

    module: nn.Module
    capabilities: Capabilities

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of this rank's micro-batch."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Backward of a scalar; divided by the accumulation steps where the engine owns them."""

    def scale(self, loss: Tensor) -> Tensor:
        """The tensor whose ``backward()`` does what ``engine.backward(loss)`` does."""

    def step(self) -> None:
        """One optimizer step at an accumulation boundary; before it, only counts the micro-batch."""

    def zero_grad(self) -> None:
        """Forget every gradient accumulated so far, wherever the engine keeps it."""

    def no_sync(self) -> AbstractContextManager[Any]:
        """Backwards inside accumulate without reduction."""

    def full_grads(self) -> dict[str, Tensor]:
        """After the boundary's backward and before step: reduced, unscaled, unclipped. None-gradients are left out."""

    def full_params(self) -> dict[str, Tensor]:
        """The current weights."""

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """By parameter and torch.optim's names (exp_avg, step, momentum_buffer ...); empty before the first step."""

    def grad_norm(self) -> float | None:
        """The global norm before clipping that the last step computed; None where it computed none."""

    def layout(self) -> Mapping[str, tuple[Piece, ...]]:
        """Who owns which elements of the master weights, each in one piece; without entry: whole on every rank."""

    def observe(self) -> Observations:
        """What the engine says about itself."""

    def save(self, path: Path) -> None:
        """Write a checkpoint that ``load`` continues from. Collective."""

    def load(self, path: Path) -> None:
        """Continue from a checkpoint of ``save``. Collective."""

    def close(self) -> None:
        """Release everything; the engine is unusable afterwards."""


class CheckpointingEngine(Protocol):
    """What an engine has beyond Engine's verbs: the first with CHECKPOINT, the second with UNIVERSAL_CHECKPOINT."""

    def full_state_dict(self) -> dict[str, Tensor]:
        """``state_dict()`` of the plain model, which loads it: copies on CPU, tied weights one tensor. Collective."""

    def load_universal(self, path: Path) -> None:
        """Continue from a checkpoint in DeepSpeed's universal layout. Collective."""


EngineFactory = Callable[["nn.Module", EngineConfig], Engine]
