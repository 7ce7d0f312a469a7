"""Read and replace the gradient, weight or optimizer state of one parameter of an engine, as a whole or by shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zharness.errors import UsageError
from zharness.reference.inspection.coalesced_collectives import all_gather_full_tensors
from zharness.reference.layout import ModelParam, ShardPlacement

if TYPE_CHECKING:
    from zharness.reference.engine import Engine


class TensorAccess:
    """Reads and replaces tensors of the parameters of ``engine`` by name.

    ``full_*`` methods are collectives: they return full tensors on the CPU, and take the same full tensor on every
    rank. ``local_*`` methods return and take this rank's elements, flat and without padding; at stage 0 these are all
    elements. Gradients are unscaled. Every method raises UsageError for an unknown parameter or state.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def full_grad(self, name: str) -> Tensor | None:
        """Return the reduced gradient, or None if no rank has one."""
        local = self._reduce().get(self._find(name).name)
        return None if local is None else self._gather(name, local) / self._scale

    def full_param(self, name: str) -> Tensor:
        """Return the weight that the optimizer updates."""
        return self._gather(name, self._leaf(name))

    def full_state(self, name: str, key: str) -> Tensor | None:
        """Return the entry ``key`` of the optimizer's state, or None if no step has updated the parameter."""
        has_state = bool(self._engine.optimizer.state.get(self._leaf(name)))
        return self._gather(name, self._state(name, key)) if has_state else None

    def set_full_grad(self, name: str, value: Tensor) -> None:
        """Replace the reduced gradient, which the next step uses."""
        self._set_grad(name, self._own_elements(name, value))

    def set_full_param(self, name: str, value: Tensor) -> None:
        """Replace the weight, which the next forward and the next step use."""
        self._set_param(name, self._own_elements(name, value))

    def set_full_state(self, name: str, key: str, value: Tensor) -> None:
        """Replace the entry ``key`` of the optimizer's state, which the next step uses."""
        self.set_local_state(name, key, self._own_elements(name, value))

    def local_grad(self, name: str) -> Tensor:
        """Return this rank's elements of the reduced gradient. This is a collective, because it reduces."""
        reduced = self._reduce()
        if self._find(name).name not in reduced:
            raise UsageError(f"parameter {name!r} has no gradient")
        return _copy_flat(reduced[name]) / self._scale

    def local_param(self, name: str) -> Tensor:
        """Return this rank's elements of the weight that the optimizer updates."""
        return _copy_flat(self._leaf(name))

    def local_state(self, name: str, key: str) -> Tensor:
        """Return this rank's elements of the entry ``key`` of the optimizer's state."""
        return _copy_flat(self._state(name, key))

    def set_local_grad(self, name: str, value: Tensor) -> None:
        """Replace this rank's elements of the reduced gradient. This is a collective, because it reduces."""
        self._set_grad(name, value)

    def set_local_param(self, name: str, value: Tensor) -> None:
        """Replace this rank's elements of the weight. This is a collective, because it updates the parameters."""
        self._set_param(name, value)

    def set_local_state(self, name: str, key: str, value: Tensor) -> None:
        """Replace this rank's elements of the entry ``key`` of the optimizer's state."""
        state = self._state(name, key)
        state.copy_(value.reshape(state.shape))

    @property
    def _scale(self) -> float:
        """The loss scale, by which reduced gradients are still multiplied."""
        return self._engine.loss_scale

    @property
    def _is_sharded(self) -> bool:
        """Whether leaves, reduced gradients and optimizer state are shards."""
        return self._engine._placements.optimizer_state is ShardPlacement.SHARDED

    def _find(self, name: str) -> ModelParam:
        """Return the parameter ``name``."""
        return self._engine._parameters._find_param(name)

    def _leaf(self, name: str) -> Tensor:
        """Return the tensor that the optimizer updates for the parameter ``name``."""
        return self._engine._parameters.leaves[self._find(name).name]

    def _reduce(self) -> dict[str, Tensor]:
        """Reduce the gradients accumulated so far, and return them by name in the shapes of the leaves."""
        return self._engine._gradients.reduce_pending()

    def _state(self, name: str, key: str) -> Tensor:
        """Return the entry ``key`` of the optimizer's state of the parameter ``name``."""
        state = self._engine.optimizer.state.get(self._leaf(name), {})
        if not isinstance(state.get(key), Tensor):
            raise UsageError.unknown_name(f"optimizer state of {name}", key, sorted(state))
        value: Tensor = state[key]
        return value

    def _gather(self, name: str, local: Tensor) -> Tensor:
        """Return the full tensor of which ``local`` is this rank's part. Returns a number (a step count) unchanged."""
        if not self._is_sharded or local.shape != self._leaf(name).shape:
            return local.detach().to("cpu", copy=True)
        return all_gather_full_tensors({name: (local, self._find(name).layout)}, self._engine.comm)[name]

    def _own_elements(self, name: str, value: Tensor) -> Tensor:
        """Return this rank's elements of the full tensor ``value``."""
        layout = self._find(name).layout
        if value.shape != layout.shape:
            raise UsageError(f"parameter {name!r} has shape {tuple(layout.shape)}, got {tuple(value.shape)}")
        start, stop = layout.shard_bounds(self._engine.comm.rank) if self._is_sharded else (0, layout.numel)
        return value.reshape(-1)[start:stop]

    @torch.no_grad()
    def _set_grad(self, name: str, value: Tensor) -> None:
        """Replace this rank's part of the reduced gradient by ``value``, times the loss scale."""
        self._reduce()
        leaf = self._leaf(name)
        grad = torch.empty_like(leaf).copy_(value.reshape(leaf.shape)).mul_(self._scale)
        self._engine._gradients._reduced_grads[self._find(name).name] = grad

    @torch.no_grad()
    def _set_param(self, name: str, value: Tensor) -> None:
        """Replace this rank's part of the weight by ``value``, and write it back to the parameters."""
        leaf = self._leaf(name)
        leaf.copy_(value.reshape(leaf.shape))
        self._engine._parameters.publish([self._find(name).name])


def _copy_flat(tensor: Tensor) -> Tensor:
    """Return a flat copy of ``tensor`` on the CPU."""
    return tensor.detach().reshape(-1).to("cpu", copy=True)
