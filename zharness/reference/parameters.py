"""The model's parameters on this rank: whole or a shard, and the leaf of each that the optimizer updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from zharness.reference.gathered import Wire
from zharness.reference.layout import Original, Owner, Owners, gather
from zharness.reference.reading import Exchange, Reader


class Parameters:
    """What ``owners`` leaves of the parameters on this rank.

    ``leaves`` are what the optimizer sees, by name: the whole parameter, or this rank's elements of it. They are views
    of the parameter's own memory (of the shard's, where parameters are sharded), so an optimizer step needs no copy
    back, and they share its version counter, so autograd notices the step.
    """

    def __init__(self, module: nn.Module, originals: Mapping[str, Original], owners: Owners, wire: Wire) -> None:
        self._originals = originals
        self._owners = owners
        self._comm = wire.comm
        self._exchange: Exchange | None = None
        if owners.parameters is Owner.SHARDED:
            for original in originals.values():
                _keep_shard(original, wire.comm.rank)
            self._exchange = Exchange(module, Reader(originals, wire))
        self.leaves = {name: self._leaf(original) for name, original in originals.items()}

    def _leaf(self, original: Original) -> Tensor:
        values, rank = original.parameter.detach(), self._comm.rank
        if self._owners.optimizer_state is Owner.WHOLE:
            return values
        if self._owners.parameters is Owner.SHARDED:
            return values[: original.layout.owned(rank)]
        start, stop = original.layout.bounds(rank)
        return values.reshape(-1)[start:stop]

    @torch.no_grad()
    def publish(self, updated: Iterable[str]) -> None:
        """After an optimizer step on the leaves ``updated``: gather what every rank holds whole. Collective."""
        for name in updated:
            original = self._originals[name]
            if self._owners.optimizer_state is Owner.SHARDED and self._owners.parameters is Owner.WHOLE:
                original.parameter.detach().copy_(gather(self.leaves[name], original.layout, self._comm))
            # A rank whose shard is empty edited nothing, yet must refuse an old graph as the other ranks do.
            torch.autograd.graph.increment_version(original.parameter)

    @torch.no_grad()
    def full(self) -> dict[str, Tensor]:
        """The current weights, copied to CPU. Collective where parameters are sharded."""
        return {name: self._whole(original).to("cpu", copy=True) for name, original in self._originals.items()}

    def _whole(self, original: Original) -> Tensor:
        values = original.parameter.detach()
        if self._owners.parameters is Owner.WHOLE:
            return values
        return gather(values, original.layout, self._comm)

    def close(self) -> None:
        """Give the modules their classes back. Sharded parameters stay shards: no collective runs here."""
        if self._exchange is not None:
            self._exchange.undo()


def _keep_shard(original: Original, rank: int) -> None:
    """Exchange the parameter's data for this rank's shard, padded to the common length."""
    layout = original.layout
    start, stop = layout.bounds(rank)
    shard = original.parameter.detach().new_zeros(layout.length)
    shard[: stop - start] = original.parameter.detach().reshape(-1)[start:stop]
    original.parameter.data = shard
