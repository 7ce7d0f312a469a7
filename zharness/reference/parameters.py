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
from zharness.reference.client.meta_init import find_deferred_modules, infer_device
from zharness.reference.collectives import all_gather_full_tensors, broadcast_tensors
from zharness.reference.layout import ModelParam, ShardPlacement, StagePlacements, all_gather_rows
from zharness.reference.sharded_modules import ModuleClassSwap, ParamUnsharder
from zharness.reference.unshard import ShardingContext

# The modules whose own parameters an engine has.
OWNED_MODULES: WeakSet[nn.Module] = WeakSet()


def refuse_owned_modules(module: nn.Module) -> None:
    """Raises ConfigError for a model of which another engine has a part."""
    for name, each in module.named_modules():
        if each in OWNED_MODULES:
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
        model_params: Mapping[str, ModelParam],
        placements: StagePlacements,
        context: ShardingContext,
        buckets: Sequence[Bucket],
    ) -> None:
        self._model_params = model_params
        self._buckets = buckets
        self._placements = placements
        self._comm = context.comm
        self._collectives = context.collectives
        self._unsharder: ParamUnsharder | None = None
        self._class_swap: ModuleClassSwap | None = None
        self.master_weights: dict[str, Tensor] = {}
        for original in self._materialise_params(module):
            self._cast_and_shard(original)
        if placements.parameters is ShardPlacement.SHARDED:
            self._unsharder = ParamUnsharder(model_params, context)
            self._class_swap = ModuleClassSwap(module, self._unsharder)
        self.leaves = {name: self.master_weights.get(name, self._make_leaf(o)) for name, o in model_params.items()}
        self._known_versions = {name: model_params[name].parameter._version for name in self.master_weights}
        self._owned_modules = [each for each in module.modules() if any(True for _ in each.parameters(recurse=False))]

    def _materialise_params(self, module: nn.Module) -> Iterator[ModelParam]:
        """Each parameter, whole. What was built on the meta device gets rank 0's values, module by module, before."""
        waiting: dict[Tensor, ModelParam] = {original.parameter: original for original in self._model_params.values()}
        home = infer_device(module, self._comm)
        for each in find_deferred_modules(module):
            made = each.materialise(home)
            broadcast_tensors(made, self._comm)
            for tensor in made:
                if tensor in waiting:
                    yield waiting.pop(tensor)
        yield from waiting.values()

    def _cast_and_shard(self, param: ModelParam) -> None:
        """Put the parameter's master aside, then leave of it what the model holds: its dtype, this rank's part."""
        parameter, formats = param.parameter, param.dtypes
        if param.has_master:
            self.master_weights[param.name] = self._local_elements(param).to(formats.master_dtype, copy=True)
        if parameter.dtype != formats.param_dtype:
            parameter.data = parameter.detach().to(formats.param_dtype)
        if self._placements.parameters is ShardPlacement.SHARDED:
            _shard_in_place(param, self._comm.rank)

    def _local_elements(self, param: ModelParam) -> Tensor:
        """This rank's elements of a parameter that is whole still, in the shape of its leaf."""
        values = param.parameter.detach()
        if self._placements.optimizer_state is ShardPlacement.REPLICATED:
            return values
        start, stop = param.layout.shard_bounds(self._comm.rank)
        return values.reshape(-1)[start:stop]

    def _make_leaf(self, param: ModelParam) -> Tensor:
        if self._placements.parameters is ShardPlacement.SHARDED:
            return param.parameter.detach()[: param.layout.owned_numel(self._comm.rank)]
        return self._local_elements(param)

    @torch.no_grad()
    def publish(self, names: Iterable[str]) -> None:
        """After an optimizer step on the leaves ``names``: gather what every rank holds whole. Collective."""
        updated = set(names)
        if (
            self._placements.optimizer_state is ShardPlacement.SHARDED
            and self._placements.parameters is ShardPlacement.REPLICATED
        ):
            self._all_gather_shards(updated)
        else:
            for name in updated & self.master_weights.keys():
                self._make_leaf(self._model_params[name]).copy_(self.leaves[name])
        for name in updated:
            parameter = self._model_params[name].parameter
            # A rank whose shard is empty edited nothing, yet must refuse an old graph as the other ranks do.
            torch.autograd.graph.increment_version(parameter)
            self._record_version(self._model_params[name])

    def _record_version(self, param: ModelParam) -> None:
        """The engine itself has changed the parameter."""
        if self._unsharder is not None:
            self._unsharder.record_version(param.parameter)
        elif param.name in self._known_versions:
            self._known_versions[param.name] = param.parameter._version

    def _all_gather_shards(self, names: Container[str]) -> None:
        for bucket in self._buckets:
            chosen = bucket.select(names)
            if chosen.members:
                held = chosen.members[0].dtypes.param_dtype
                rows = all_gather_rows(
                    chosen.pack_shards(self.leaves[o.name].to(held) for o in chosen.members), self._comm
                )
                chosen.unpack_rows(rows, [original.parameter.detach() for original in chosen.members])

    def allow_uneven_ranks(self) -> AbstractContextManager[None]:
        """The engine's ``uneven``."""
        return self._collectives.allow_uneven_ranks()

    def check_ready_to_step(self) -> None:
        """Raise UsageError inside ``gathered`` or ``uneven``, and for an edit that the step would lose."""
        self._collectives.require_even("a step")
        if self._unsharder is not None:
            self._unsharder.refuse_lost_edits()
            return
        for name, version in self._known_versions.items():
            if self._model_params[name].parameter._version != version:
                raise UsageError(
                    f"parameter {name!r} was edited in place, but the optimizer steps on its master and would undo the "
                    "edit; edit it inside `with engine.gathered():`, or load_checkpoint"
                )

    @contextmanager
    def unshard_for_edit(
        self, selection: Iterable[str | nn.Parameter] | None, source: int
    ) -> Iterator[dict[str, Tensor]]:
        """The engine's ``gathered``. Collective, at both ends."""
        found = [self._find_param(each) for each in (self._model_params if selection is None else selection)]
        parameters = [original.parameter for original in found]
        values = (
            [p.detach() for p in parameters]
            if self._unsharder is None
            else self._unsharder.unshard_for_edit(parameters)
        )
        before = [value.clone() for value in values] if self._unsharder is None else []
        outcome = torch.ones(1, dtype=torch.uint8, device=values[0].device if values else None)
        given = {original.name: value for original, value in zip(found, values, strict=True)}
        try:
            yield given
            outcome.zero_()
        finally:
            given.clear()  # what is edited later would be lost
            if self._unsharder is not None:
                self._unsharder.end_edit()
            self._comm.all_reduce(outcome, op=dist.ReduceOp.MAX)
            if outcome.any():
                for value, old, original in zip(values, before, found, strict=False):
                    value.copy_(old)
                    self._record_version(original)
        if outcome.any():
            raise UsageError("another rank raised inside gathered(), so the edits of every rank are dropped")
        for original, value in zip(found, values, strict=True):
            self._broadcast_edit(original, value, source)

    @torch.no_grad()
    def _broadcast_edit(self, param: ModelParam, value: Tensor, source: int) -> None:
        """Make rank ``source``'s ``value`` the full parameter on every rank. Collective.

        A master keeps the elements that were not edited: they are finer than what the model holds of them.
        """
        broadcast_tensors([value], self._comm, source)
        if self._placements.parameters is ShardPlacement.REPLICATED:
            param.parameter.detach().copy_(value)
        start, stop = param.layout.shard_bounds(self._comm.rank)
        part = value if self._placements.optimizer_state is ShardPlacement.REPLICATED else value.reshape(-1)[start:stop]
        leaf = self.leaves[param.name]
        leaf.copy_(torch.where(leaf.to(part.dtype) == part, leaf, part.to(leaf.dtype)))
        self.publish([param.name])

    def _find_param(self, selected: str | nn.Parameter) -> ModelParam:
        for original in self._model_params.values():
            if original.name == selected or original.parameter is selected:
                return original
        shown = selected if isinstance(selected, str) else f"a tensor of shape {tuple(selected.shape)}"
        raise UsageError.unknown_name("parameter", shown, self._model_params)

    @torch.no_grad()
    def full_params(self) -> dict[str, Tensor]:
        """The current weights, copied to CPU. Collective where parameters are sharded."""
        return self._gather_full_tensors(
            {name: o.parameter for name, o in self._model_params.items()}, self._placements.parameters
        )

    @torch.no_grad()
    def full_masters(self) -> dict[str, Tensor]:
        """The masters where there are any, original shapes, copied to CPU. Collective where they are sharded."""
        return self._gather_full_tensors(self.master_weights, self._placements.optimizer_state)

    def _gather_full_tensors(self, tensors: Mapping[str, Tensor], placement: ShardPlacement) -> dict[str, Tensor]:
        if placement is ShardPlacement.REPLICATED:
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        return all_gather_full_tensors(
            {name: (each, self._model_params[name].layout) for name, each in tensors.items()}, self._comm
        )

    def close(self) -> None:
        """Give the modules their classes back. Sharded parameters stay shards: no collective runs here."""
        if self._class_swap is not None:
            self._class_swap.restore_classes()
        else:
            OWNED_MODULES.difference_update(self._owned_modules)

    def mark_modules_owned(self) -> None:
        """From now on no other engine gets these parameters: until ``close``, and for good where they are shards."""
        OWNED_MODULES.update(self._owned_modules)


def _shard_in_place(param: ModelParam, rank: int) -> None:
    """Exchange the parameter's data for this rank's shard, padded to the common length."""
    layout = param.layout
    start, stop = layout.shard_bounds(rank)
    shard = param.parameter.detach().new_zeros(layout.shard_length)
    shard[: stop - start] = param.parameter.detach().reshape(-1)[start:stop]
    # A graph that is older than the engine may hold the parameter's gradient accumulator, which insists on the whole
    # shape. Autograd makes a new one only where the dtype changes, so it does, for a moment.
    other = torch.float32 if shard.dtype == torch.float64 else torch.float64
    param.parameter.data = shard.new_empty(0, dtype=other)
    param.parameter.data = shard
