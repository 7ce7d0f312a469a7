"""Define the optional methods by which an engine reads out and writes in one named gradient, weight or state.

An adapter implements these methods with the engine's own public functions for this purpose (``safe_get_full_grad``,
``DTensor.full_tensor``). The methods of ``Engine``, in contrast, may read an engine in any way that gives the right
tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from zharness.engines.protocol import Engine, Feature, require_method

if TYPE_CHECKING:
    from torch import Tensor


class SupportsReadOut(Protocol):
    """An engine that returns one tensor of a named parameter, as ``Feature.READ_OUT`` requires.

    Every method is a collective, and returns a copy on CPU in the parameter's original shape, the same on every rank.
    """

    def read_grad(self, name: str) -> Tensor | None:
        """Return the gradient that the next ``step`` applies, reduced, unscaled and unclipped.

        Laws call this method after the backward and before the step of an accumulation boundary. Returns None for a
        parameter without a gradient, for example a frozen one.
        """

    def read_param(self, name: str) -> Tensor | None:
        """Return the weight that the optimizer updates: the master weight, or the parameter if there is none.

        Returns None for a frozen parameter if the engine keeps no such weight for it.
        """

    def read_optimizer_state(self, name: str, key: str) -> Tensor | None:
        """Return the entry ``key`` (``exp_avg``, ``momentum_buffer``) of the optimizer's state, after the first step.

        With ``Feature.STEP_READ_OUT``, ``key`` may also be ``step``, the number of steps that used the parameter.
        Returns None for a frozen parameter.
        """


class SupportsWriteIn(Protocol):
    """An engine that replaces one tensor of a named parameter, as ``Feature.WRITE_IN`` requires.

    Every method is a collective that gets the same full tensor ``value`` on every rank, in the parameter's original
    shape and the dtype of the master weights. Laws write to trained parameters only.
    """

    def write_grad(self, name: str, value: Tensor) -> None:
        """Replace the gradient before the step of an accumulation boundary; norm, clipping and update use ``value``.

        A weight that no micro-batch of the step used, and that has no gradient, gets ``value`` as its gradient.

        With ``Feature.WINDOW_WRITE_IN``, the gradient may also be replaced after an earlier micro-batch of the window.
        ``value`` then replaces the contribution of this micro-batch and of the earlier micro-batches to the gradient of
        the step, in the units of ``full_grads()``. Later micro-batches are added to ``value``.
        """

    def write_param(self, name: str, value: Tensor) -> None:
        """Replace the weight that the optimizer updates; the next step starts from it.

        With ``Feature.WRITE_IN_FORWARD``, the next forward uses it too.
        """

    def write_optimizer_state(self, name: str, key: str, value: Tensor) -> None:
        """Replace an entry of the optimizer's state, which the next step uses."""


class SupportsShardAccess(Protocol):
    """An engine that reads and writes this rank's shard of a named tensor, as ``Feature.SHARD_ACCESS`` requires.

    A shard is a flat tensor: the elements that ``layout()`` assigns to this rank, followed by fewer than N elements of
    padding, where N is the world size. The methods correspond to those of ``SupportsReadOut`` and ``SupportsWriteIn``;
    every rank calls them in the same order, and writes a shard of the length that it reads.
    """

    def read_grad_shard(self, name: str) -> Tensor:
        """Return a copy on CPU of this rank's shard of the gradient, before the step of an accumulation boundary."""

    def read_param_shard(self, name: str) -> Tensor:
        """Return a copy on CPU of this rank's shard of the weight that the optimizer updates."""

    def read_optimizer_state_shard(self, name: str, key: str) -> Tensor:
        """Return a copy on CPU of this rank's shard of an entry of the optimizer's state."""

    def write_grad_shard(self, name: str, value: Tensor) -> None:
        """Replace this rank's shard of the gradient; norm, clipping and update use it."""

    def write_param_shard(self, name: str, value: Tensor) -> None:
        """Replace this rank's shard of the weight that the optimizer updates; the next step starts from it."""

    def write_optimizer_state_shard(self, name: str, key: str, value: Tensor) -> None:
        """Replace this rank's shard of an entry of the optimizer's state, which the next step uses."""


READ_METHODS = ("read_grad", "read_param", "read_optimizer_state")
WRITE_METHODS = ("write_grad", "write_param", "write_optimizer_state")


def require_read_out(engine: Engine) -> SupportsReadOut:
    """Return ``engine``. Raises EngineContractError if it lacks a method of SupportsReadOut."""
    for name in READ_METHODS:
        require_method(engine, name, Feature.READ_OUT)
    return cast(SupportsReadOut, engine)


def require_write_in(engine: Engine) -> SupportsWriteIn:
    """Return ``engine``. Raises EngineContractError if it lacks a method of SupportsWriteIn."""
    for name in WRITE_METHODS:
        require_method(engine, name, Feature.WRITE_IN)
    return cast(SupportsWriteIn, engine)


def require_shard_access(engine: Engine) -> SupportsShardAccess:
    """Return ``engine``. Raises EngineContractError if it lacks a method of SupportsShardAccess."""
    for name in (*READ_METHODS, *WRITE_METHODS):
        require_method(engine, f"{name}_shard", Feature.SHARD_ACCESS)
    return cast(SupportsShardAccess, engine)
