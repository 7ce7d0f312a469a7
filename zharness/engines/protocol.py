"""Define the Engine protocol: the methods that laws call on every engine, and the data that describes an engine.

``Engine`` has the methods that every engine needs. The ``Supports...`` protocols declare optional methods; laws find
them with the functions ``supports_...`` and ``require_...`` at the end of this file. docs/your-engine.md lists the
errors that each method may raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, cast, runtime_checkable

from zharness.engines.capabilities import Capabilities as Capabilities
from zharness.engines.capabilities import EngineOption as EngineOption
from zharness.engines.capabilities import Feature as Feature
from zharness.engines.promises import BufferPromise as BufferPromise
from zharness.engines.promises import CallForm as CallForm
from zharness.engines.promises import WeightGathers as WeightGathers
from zharness.errors import EngineContractError
from zharness.mesh import DEFAULT_MESH, Mesh

if TYPE_CHECKING:
    from torch import Tensor, nn


class AccumulationOwner(Enum):
    """Who divides the loss by the number of micro-batches and ends each step: the engine or its caller."""

    ENGINE = "engine"
    CALLER = "caller"


class Reduction(Enum):
    """The choice between averaging and summing gradients over ranks."""

    MEAN = "mean"
    SUM = "sum"


@dataclass(frozen=True)
class GroupSpec:
    """One parameter group of an optimizer: the parameters whose names match the glob ``pattern``.

    ``overrides`` are the optimizer's arguments for these parameters.
    """

    pattern: str
    overrides: Mapping[str, Any]


@dataclass(frozen=True)
class OptimizerSpec:
    """A torch.optim optimizer by name, with its arguments, parameter groups and learning-rate schedule.

    Parameters that match no group form the first group, which takes ``args`` without overrides. ``schedule[t]`` is the
    factor by which every group's learning rate is multiplied in step t; the last factor holds for all later steps.
    """

    name: str = "sgd"
    args: Mapping[str, Any] = field(default_factory=lambda: {"lr": 1.0})
    groups: tuple[GroupSpec, ...] = ()
    schedule: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class EngineConfig:
    """The configuration that a law passes to an engine and to its baseline.

    - ``dtype`` applies to parameters, gradients and their reduction. Under bf16 and fp16 the optimizer updates fp32
      master weights.
    - ``loss_scale`` is the static loss scale under fp16.
    - ``options`` are the engine's own options.
    - ``mesh`` has the axes of parallelism beside data parallelism.
    - ``tp_plan`` says by the name of a module how the axis tp splits it, in the words of transformers' plans:
      ``colwise``, ``rowwise``.
    - ``pp_plan`` has the names of the modules that the model calls one after another, each with the outputs of the
      previous module. The axis pp splits this list of modules.
    - ``ep_plan`` has the names of the layers of experts, whose experts the axis ep splits. Such a layer has a ``gate``,
      a linear layer without bias, and ``experts``; each token goes to the expert with the largest softmax.
    - ``cp_plan`` has the names of the attention modules. The axis cp splits the sequence, and only these modules need
      the whole sequence. Their query, key, value and output are (samples, tokens, heads, features of a head).
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
    mesh: Mesh = DEFAULT_MESH
    tp_plan: Mapping[str, str] = field(default_factory=dict)
    pp_plan: tuple[str, ...] = ()
    ep_plan: tuple[str, ...] = ()
    cp_plan: tuple[str, ...] = ()


@dataclass(frozen=True)
class Absent:
    """The reason why an engine does not report an observation, recorded in place of the observation."""

    reason: str


@dataclass(frozen=True)
class Resources:
    """The bytes that are allocated on this rank; ``parameters`` includes unsharded copies of parameters."""

    parameters: int
    gradients: int
    optimizer_state: int


@dataclass(frozen=True)
class Traffic:
    """The bytes that this rank sent and received in collectives since the engine was built.

    ``sent`` is the sum over all collectives of full bytes x passes x (N-1)/N, where N is the world size.
    ``peak_gathered`` is the largest number of bytes that unsharded copies of sharded parameters took at one time.
    """

    sent: float
    peak_gathered: int


@dataclass(frozen=True)
class Observations:
    """The values that an engine reports between steps; they are identical on all ranks.

    - ``gathered_bytes`` is the number of bytes of the unsharded copies of sharded parameters that exist now.
    - ``sent_elements`` is the number of elements sent since the engine was built, by collective and dtype, as in
      ``"reduce_scatter bfloat16"``.
    - ``masters`` are the weights that the optimizer updates, if these are not the parameters themselves.
    """

    loss_scale: float | Absent
    skipped_steps: int | Absent
    learning_rates: tuple[float, ...] | Absent
    gathered_bytes: int | Absent = Absent("the engine does not count gathered bytes")
    sent_elements: Mapping[str, int] | Absent = Absent("the engine does not count the elements that it sends")
    masters: Mapping[str, Tensor] | Absent = Absent("the optimizer works on the parameters themselves")
    resources: Resources | Absent = Absent("the engine does not count allocated bytes")
    traffic: Traffic | Absent = Absent("the engine does not count the bytes that it sends")


@dataclass(frozen=True)
class Piece:
    """The elements from ``start`` to ``stop`` of a flattened original tensor, which ``rank`` owns."""

    rank: int
    start: int
    stop: int


@runtime_checkable
class Engine(Protocol):
    """A training engine around ``module`` on this rank; every rank builds one after the default process group exists.

    Methods that return dictionaries of tensors are collective. The dictionaries have the original parameter names and
    shapes and are identical on every rank; a tied parameter appears once, under the name that ``named_parameters()`` of
    the original model gives it. The tensors are copies on CPU, which the caller may overwrite.

    With ``Feature.IN_PLACE_EDITS``, the caller may also edit the parameters of ``module`` in place between steps, under
    ``torch.no_grad`` and in the same way on every rank (if a parameter is sharded, the caller edits the shard). The
    next forward and step then use the edited weights, or a later call raises an error on every rank; no step undoes an
    edit.
    """

    module: nn.Module
    capabilities: Capabilities

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of this rank's micro-batch."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Run backward on a scalar loss, divided by the accumulation steps if the engine owns accumulation."""

    def scale(self, loss: Tensor) -> Tensor:
        """Return a tensor whose ``backward()`` does what ``engine.backward(loss)`` does."""

    def step(self) -> None:
        """Run the optimizer at an accumulation boundary; between boundaries only count the micro-batch."""

    def zero_grad(self) -> None:
        """Drop every accumulated gradient, including those that are not in ``.grad``."""

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which backwards accumulate gradients without reducing them."""

    def full_grads(self) -> dict[str, Tensor]:
        """Return the reduced, unscaled, unclipped gradients, between the boundary's backward and ``step()``.

        The dictionary leaves out parameters whose gradient is None.
        """

    def full_params(self) -> dict[str, Tensor]:
        """Return the current full weights by parameter name."""

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer state by parameter and torch.optim's keys (``exp_avg``, ``step``, ``momentum_buffer``).

        The dictionary is empty before the first step.
        """

    def grad_norm(self) -> float | None:
        """Return the global gradient norm before clipping of the last step, or None if that step computed no norm."""

    def layout(self) -> Mapping[str, tuple[Piece, ...]]:
        """Return which piece of each master weight each rank owns; every rank owns all of a weight without an entry."""

    def observe(self) -> Observations:
        """Return the loss scale, learning rates, counters and memory of this engine. This is a collective."""

    def save(self, path: Path) -> None:
        """Write a checkpoint from which ``load`` continues. This is a collective.

        Raises an error on every rank if any rank cannot write.
        """

    def load(self, path: Path) -> None:
        """Continue training from a checkpoint that ``save`` wrote. This is a collective.

        Raises an error on every rank, and changes nothing, if a file is missing, damaged or contains code.
        """

    def close(self) -> None:
        """Free everything that the engine allocated; the engine cannot be used afterwards."""


class SupportsUneven(Protocol):
    """An engine that must be told when ranks use different parameters; other engines need no ``uneven``."""

    def uneven(self) -> AbstractContextManager[Any]:
        """Return a context in which ranks may use different parameters, for models whose branches depend on the data.

        The end of the block is a collective. Raises an error on every rank if the block raised on any rank.
        """


class SupportsGathered(Protocol):
    """An engine that lets one rank edit the full weights, as ``Feature.EDITS`` requires."""

    def gathered(self, names: Sequence[str]) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Return a context that yields full weights by name, and at its end gives every rank the weights of rank 0.

        The tensors are the module's own parameters, or copies that overwrite these at the end of the block. The block
        begins and ends with a collective, and changes master weights too. Raises an error for an unknown name.
        """


class SupportsFullStateDict(Protocol):
    """An engine that returns a state dict for the plain model, as ``Feature.CHECKPOINT`` requires."""

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return a state dict that the plain model loads, with copies on CPU. This is a collective.

        A tied parameter is one tensor under all its names.
        """


class SupportsLoadUniversal(Protocol):
    """An engine that loads DeepSpeed's universal checkpoints, as ``Feature.UNIVERSAL_CHECKPOINT`` requires."""

    def load_universal(self, path: Path) -> None:
        """Continue training from a checkpoint in DeepSpeed's universal layout. This is a collective.

        Raises an error on every rank, and changes nothing, if a file is missing or damaged.
        """


class SupportsTrainBatch(Protocol):
    """An engine of the form ``CallForm.WHOLE_BATCH``, such as a pipeline: callers cannot call forward and backward."""

    def train_batch(
        self, micro_batches: Sequence[tuple[Tensor, Tensor]], loss: Callable[[Any, Any], Tensor]
    ) -> Sequence[Tensor]:
        """Run forward and backward of all micro-batches of a step, and return their losses on every rank.

        A micro-batch is inputs and target. Afterwards ``full_grads()`` has the mean over the micro-batches, added to
        the gradients of earlier batches since ``zero_grad()``. This is a collective.
        """


@dataclass(frozen=True)
class TrainedStep:
    """The record of one optimizer step of a whole training; it is identical on all ranks.

    ``loss`` is the loss that the engine reports for the step, ``norm`` the global gradient norm before clipping,
    ``grads`` the reduced gradients with which the optimizer made the step, and ``params`` the weights after it.
    """

    loss: float
    norm: float
    grads: Mapping[str, Tensor]
    params: Mapping[str, Tensor]


class SupportsTrain(Protocol):
    """An engine of the form ``CallForm.WHOLE_TRAINING``, such as a Trainer: it runs its own loop over all steps."""

    def train(
        self, samples: Sequence[tuple[Tensor, Tensor]], loss: Callable[..., Tensor], counts_items: bool
    ) -> Sequence[TrainedStep]:
        """Train one epoch of ``samples``, which are inputs and targets in order, and return the record of each step.

        Ranks take micro-batches of ``EngineConfig.micro_batch_size`` samples in turns, and a step takes
        ``accumulation_steps`` micro-batches from each rank; the last step takes the rest. ``loss(output, target)`` is
        the mean of a micro-batch, and a step takes the mean over its micro-batches. With ``counts_items``,
        ``loss(output, target, items)`` is a micro-batch's part of the step's loss, and ``items`` the number of elements
        of all targets of the step that are not ``IGNORED``. This is a collective.
        """


IGNORED = -100.0  # the target of an element that does not count, as in torch's cross-entropy


def require_train(engine: Engine) -> SupportsTrain:
    """Return ``engine``. Raises EngineContractError if it has no method ``train``."""
    if not _has_method(engine, "train"):
        raise EngineContractError(
            f"{type(engine).__name__} has the form {CallForm.WHOLE_TRAINING.name} but no method train()"
        )
    return cast(SupportsTrain, engine)


def require_train_batch(engine: Engine) -> SupportsTrainBatch:
    """Return ``engine``. Raises EngineContractError if it has no method ``train_batch``."""
    if not _has_method(engine, "train_batch"):
        raise EngineContractError(
            f"{type(engine).__name__} has the form {CallForm.WHOLE_BATCH.name} but no method train_batch()"
        )
    return cast(SupportsTrainBatch, engine)


def supports_uneven(engine: Engine) -> TypeGuard[SupportsUneven]:
    """Return whether ``engine`` has the optional method ``uneven``."""
    return _has_method(engine, "uneven")


def supports_gathered(engine: Engine) -> TypeGuard[SupportsGathered]:
    """Return whether ``engine`` has the optional method ``gathered``."""
    return _has_method(engine, "gathered")


def require_gathered(engine: Engine) -> SupportsGathered:
    """Return ``engine``. Raises EngineContractError if it has no method ``gathered``."""
    require_method(engine, "gathered", Feature.EDITS)
    return cast(SupportsGathered, engine)


def require_full_state_dict(engine: Engine) -> SupportsFullStateDict:
    """Return ``engine``. Raises EngineContractError if it has no method ``full_state_dict``."""
    require_method(engine, "full_state_dict", Feature.CHECKPOINT)
    return cast(SupportsFullStateDict, engine)


def require_load_universal(engine: Engine) -> SupportsLoadUniversal:
    """Return ``engine``. Raises EngineContractError if it has no method ``load_universal``."""
    require_method(engine, "load_universal", Feature.UNIVERSAL_CHECKPOINT)
    return cast(SupportsLoadUniversal, engine)


def require_method(engine: Engine, name: str, feature: Feature) -> None:
    """Raise EngineContractError if the engine lacks the method ``name``, which ``feature`` requires."""
    if not _has_method(engine, name):
        raise EngineContractError(
            f"{type(engine).__name__} claims Feature.{feature.name} but has no method {name}(); "
            "define the method, or add the feature to Capabilities.refuses (`zharness docs your-engine`)"
        )


def _has_method(engine: Engine, name: str) -> bool:
    """Return whether the engine has the method ``name``, defined by its class or forwarded by ``__getattr__``."""
    # Not isinstance with a runtime protocol: from Python 3.12 on it does not see methods that a wrapper forwards by
    # __getattr__, and engines that wrap another engine forward the optional methods.
    return callable(getattr(engine, name, None))


EngineFactory = Callable[["nn.Module", EngineConfig], Engine]
