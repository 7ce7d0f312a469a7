"""The model's parameters on this rank: whole or a shard, and the leaf of each that the optimizer updates."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.errors import ConfigError, UsageError
from zharness.reference.buckets import Bucket
from zharness.reference.deferred import deferred, device_of
from zharness.reference.gathered import Wire
from zharness.reference.layout import Original, Owner, Owners, gather_rows
from zharness.reference.packed import gather_all, share
from zharness.reference.reading import Exchange, Reader

# The modules whose own parameters an engine has.
TAKEN: WeakSet[nn.Module] = WeakSet()


def refuse_taken(module: nn.Module) -> None:
    """Raises ConfigError for a model of which another engine has a part."""
    for name, each in module.named_modules():
        if each in TAKEN:
            raise ConfigError(
                f"module {name!r} of the model belongs to an engine already, which it would corrupt: close() that one "
                "first; from stage 3, whose parameters stay shards, pass copy.deepcopy(engine.module) made before that"
            )


class Parameters:
    """What ``owners`` leaves of the parameters on this rank.

    ``leaves`` are what the optimizer sees, by name: the whole parameter, or this rank's elements of it. They are views
    of the parameter's own memory (of the shard's, where parameters are sharded), so an optimizer step needs no copy
    back, and they share its version counter, so autograd notices the step. Where the optimizer works in another dtype
    than the model holds, the leaf is a master: a copy of the values as they were given, from which ``publish`` casts.
    """

    def __init__(
        self,
        module: nn.Module,
        originals: Mapping[str, Original],
        owners: Owners,
        wire: Wire,
        travelling: Sequence[Bucket],
    ) -> None:
        self._originals = originals
        self._buckets = travelling
        self._owners = owners
        self._comm = wire.comm
        self._channel = wire.channel
        self._reader: Reader | None = None
        self._exchange: Exchange | None = None
        self.masters: dict[str, Tensor] = {}
        for original in self._unsettled(module):
            self._settle(original)
        if owners.parameters is Owner.SHARDED:
            self._reader = Reader(originals, wire)
            self._exchange = Exchange(module, self._reader)
        self.leaves = {name: self.masters.get(name, self._leaf(o)) for name, o in originals.items()}
        self._versions = {name: originals[name].parameter._version for name in self.masters}
        self._holders = [each for each in module.modules() if any(True for _ in each.parameters(recurse=False))]

    def _unsettled(self, module: nn.Module) -> Iterator[Original]:
        """Each parameter, whole. What was built on the meta device gets rank 0's values, module by module, before."""
        waiting: dict[Tensor, Original] = {original.parameter: original for original in self._originals.values()}
        home = device_of(module, self._comm)
        for each in deferred(module):
            made = each.materialise(home)
            share(made, self._comm)
            for tensor in made:
                if tensor in waiting:
                    yield waiting.pop(tensor)
        yield from waiting.values()

    def _settle(self, original: Original) -> None:
        """Put the parameter's master aside, then leave of it what the model holds: its dtype, this rank's part."""
        parameter, formats = original.parameter, original.formats
        if original.has_master:
            self.masters[original.name] = self._elements(original).to(formats.master, copy=True)
        if parameter.dtype != formats.held:
            parameter.data = parameter.detach().to(formats.held)
        if self._owners.parameters is Owner.SHARDED:
            _keep_shard(original, self._comm.rank)

    def _elements(self, original: Original) -> Tensor:
        """This rank's elements of a parameter that is whole still, in the shape of its leaf."""
        values = original.parameter.detach()
        if self._owners.optimizer_state is Owner.WHOLE:
            return values
        start, stop = original.layout.bounds(self._comm.rank)
        return values.reshape(-1)[start:stop]

    def _leaf(self, original: Original) -> Tensor:
        if self._owners.parameters is Owner.SHARDED:
            return original.parameter.detach()[: original.layout.owned(self._comm.rank)]
        return self._elements(original)

    @torch.no_grad()
    def publish(self, names: Iterable[str]) -> None:
        """After an optimizer step on the leaves ``names``: gather what every rank holds whole. Collective."""
        updated = set(names)
        if self._owners.optimizer_state is Owner.SHARDED and self._owners.parameters is Owner.WHOLE:
            self._share_shards(updated)
        else:
            for name in updated & self.masters.keys():
                self._leaf(self._originals[name]).copy_(self.leaves[name])
        for name in updated:
            parameter = self._originals[name].parameter
            # A rank whose shard is empty edited nothing, yet must refuse an old graph as the other ranks do.
            torch.autograd.graph.increment_version(parameter)
            self._know(self._originals[name])

    def _know(self, original: Original) -> None:
        """The engine itself has changed the parameter."""
        if self._reader is not None:
            self._reader.know(original.parameter)
        elif original.name in self._versions:
            self._versions[original.name] = original.parameter._version

    def _share_shards(self, names: Container[str]) -> None:
        for bucket in self._buckets:
            chosen = bucket.only(names)
            if chosen.members:
                held = chosen.members[0].formats.held
                rows = gather_rows(chosen.join(self.leaves[o.name].to(held) for o in chosen.members), self._comm)
                chosen.spread(rows, [original.parameter.detach() for original in chosen.members])

    def uneven(self) -> AbstractContextManager[None]:
        """The engine's ``uneven``."""
        return self._channel.uneven()

    def ready_to_step(self) -> None:
        """Raise UsageError inside ``gathered`` or ``uneven``, and for an edit that the step would lose."""
        self._channel.require_even("a step")
        if self._reader is not None:
            self._reader.refuse_lost_edits()
            return
        for name, version in self._versions.items():
            if self._originals[name].parameter._version != version:
                raise UsageError(
                    f"parameter {name!r} was edited in place, but the optimizer steps on its master and would undo the "
                    "edit; edit it inside `with engine.gathered():`, or load_checkpoint"
                )

    @contextmanager
    def gathered(self, chosen: Iterable[str | nn.Parameter] | None, source: int) -> Iterator[dict[str, Tensor]]:
        """The engine's ``gathered``. Collective, at both ends."""
        found = [self._find(each) for each in (self._originals if chosen is None else chosen)]
        parameters = [original.parameter for original in found]
        values = [p.detach() for p in parameters] if self._reader is None else self._reader.lend(parameters)
        before = [value.clone() for value in values] if self._reader is None else []
        outcome = torch.ones(1, dtype=torch.uint8, device=values[0].device if values else None)
        given = {original.name: value for original, value in zip(found, values, strict=True)}
        try:
            yield given
            outcome.zero_()
        finally:
            given.clear()  # what is edited later would be lost
            if self._reader is not None:
                self._reader.take_back()
            self._comm.all_reduce(outcome, op=dist.ReduceOp.MAX)
            if outcome.any():
                for value, old, original in zip(values, before, found, strict=False):
                    value.copy_(old)
                    self._know(original)
        if outcome.any():
            raise UsageError("another rank raised inside gathered(), so the edits of every rank are dropped")
        for original, value in zip(found, values, strict=True):
            self._replace(original, value, source)

    @torch.no_grad()
    def _replace(self, original: Original, value: Tensor, source: int) -> None:
        """Make rank ``source``'s ``value`` the full parameter on every rank. Collective.

        A master keeps the elements that were not edited: they are finer than what the model holds of them.
        """
        share([value], self._comm, source)
        if self._owners.parameters is Owner.WHOLE:
            original.parameter.detach().copy_(value)
        start, stop = original.layout.bounds(self._comm.rank)
        part = value if self._owners.optimizer_state is Owner.WHOLE else value.reshape(-1)[start:stop]
        leaf = self.leaves[original.name]
        leaf.copy_(torch.where(leaf.to(part.dtype) == part, leaf, part.to(leaf.dtype)))
        self.publish([original.name])

    def _find(self, chosen: str | nn.Parameter) -> Original:
        for original in self._originals.values():
            if original.name == chosen or original.parameter is chosen:
                return original
        shown = chosen if isinstance(chosen, str) else f"a tensor of shape {tuple(chosen.shape)}"
        raise UsageError.unknown("parameter", shown, self._originals)

    @torch.no_grad()
    def full(self) -> dict[str, Tensor]:
        """The current weights, copied to CPU. Collective where parameters are sharded."""
        return self._wholes({name: o.parameter for name, o in self._originals.items()}, self._owners.parameters)

    @torch.no_grad()
    def full_masters(self) -> dict[str, Tensor]:
        """The masters where there are any, original shapes, copied to CPU. Collective where they are sharded."""
        return self._wholes(self.masters, self._owners.optimizer_state)

    def _wholes(self, tensors: Mapping[str, Tensor], owner: Owner) -> dict[str, Tensor]:
        if owner is Owner.WHOLE:
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        return gather_all({name: (each, self._originals[name].layout) for name, each in tensors.items()}, self._comm)

    def close(self) -> None:
        """Give the modules their classes back. Sharded parameters stay shards: no collective runs here."""
        if self._exchange is not None:
            self._exchange.undo()
        else:
            TAKEN.difference_update(self._holders)

    def take(self) -> None:
        """From now on no other engine gets these parameters: until ``close``, and for good where they are shards."""
        TAKEN.update(self._holders)


def _keep_shard(original: Original, rank: int) -> None:
    """Exchange the parameter's data for this rank's shard, padded to the common length."""
    layout = original.layout
    start, stop = layout.bounds(rank)
    shard = original.parameter.detach().new_zeros(layout.length)
    shard[: stop - start] = original.parameter.detach().reshape(-1)[start:stop]
    # A graph that is older than the engine may hold the parameter's gradient accumulator, which insists on the whole
    # shape. Autograd makes a new one only where the dtype changes, so it does, for a moment.
    other = torch.float32 if shard.dtype == torch.float64 else torch.float64
    original.parameter.data = shard.new_empty(0, dtype=other)
    original.parameter.data = shard
