"""Keep the model's parameters on this rank, replicated or sharded, and the tensors that the optimizer updates."""

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
from zharness.reference.inspection.coalesced_collectives import all_gather_full_tensors, broadcast_tensors
from zharness.reference.layout import ModelParam, ShardPlacement, StagePlacements, all_gather_rows
from zharness.reference.sharded_modules import ModuleClassSwap, ParamUnsharder
from zharness.reference.unshard import ShardingContext

# The modules whose parameters belong to an engine.
OWNED_MODULES: WeakSet[nn.Module] = WeakSet()


def refuse_owned_modules(module: nn.Module) -> None:
    """Raise ConfigError if a module of the model belongs to another engine."""
    for name, submodule in module.named_modules():
        if submodule in OWNED_MODULES:
            raise ConfigError(
                f"module {name!r} of the model belongs to another engine already: close() that engine first; at stage "
                "3, where parameters stay shards after close(), pass copy.deepcopy(engine.module), made before close()"
            )


class Parameters:
    """The parameters of one engine on this rank, replicated or sharded as ``placements`` says.

    ``leaves`` maps each parameter's name to its leaf, the tensor that the optimizer updates: the full parameter, or
    this rank's elements of it. A leaf is a view of the memory of the parameter (at stage 3, of its shard), so an
    optimizer step needs no copy back. The leaf also shares the parameter's version counter, so autograd notices the
    step. If the optimizer has another dtype than the model, or a frozen parameter was cast for the forward, the leaf is
    instead a master weight, a copy of the original values, and ``publish`` casts it back into the parameter.
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
        self._frozen = {name for name, param in model_params.items() if not param.parameter.requires_grad}
        for param in self._materialise_params(module):
            self._cast_and_shard(param)
        if placements.parameters is ShardPlacement.SHARDED:
            self._unsharder = ParamUnsharder(model_params, context)
            self._class_swap = ModuleClassSwap(module, self._unsharder)
        self.leaves = {name: self.master_weights.get(name, self._make_leaf(p)) for name, p in model_params.items()}
        self._known_versions = {name: model_params[name].parameter._version for name in self.master_weights}
        self._owned_modules = [m for m in module.modules() if any(True for _ in m.parameters(recurse=False))]

    def _materialise_params(self, module: nn.Module) -> Iterator[ModelParam]:
        """Yield each full parameter once, after initializing modules that are on the meta device. This is a collective.

        The caller shards each parameter before the next module is initialized, so only one module is full at a time.
        """
        remaining: dict[Tensor, ModelParam] = {param.parameter: param for param in self._model_params.values()}
        device = infer_device(module, self._comm)
        for deferred in find_deferred_modules(module):
            tensors = deferred.materialise(device)
            broadcast_tensors(tensors, self._comm.all_ranks)
            for tensor in tensors:
                if tensor in remaining:
                    yield remaining.pop(tensor)
        yield from remaining.values()

    def _cast_and_shard(self, param: ModelParam) -> None:
        """Create the master weight of ``param`` if it has one, cast the parameter, and shard it at stage 3."""
        parameter, dtypes = param.parameter, param.dtypes
        if param.has_master:
            self.master_weights[param.name] = self._local_elements(param).to(dtypes.master_dtype, copy=True)
        if parameter.dtype != dtypes.param_dtype:
            parameter.data = parameter.detach().to(dtypes.param_dtype)
        if self._placements.parameters is ShardPlacement.SHARDED:
            _shard_in_place(param, self._comm.rank)

    def _local_elements(self, param: ModelParam) -> Tensor:
        """Return the elements of a full parameter that this rank's optimizer updates, shaped as its leaf tensor."""
        values = param.parameter.detach()
        if self._placements.optimizer_state is ShardPlacement.REPLICATED:
            return values
        start, stop = param.layout.shard_bounds(self._comm.rank)
        return values.reshape(-1)[start:stop]

    def _make_leaf(self, param: ModelParam) -> Tensor:
        """Return this rank's elements of ``param`` as a view, which at stage 3 leaves out the shard's padding."""
        if self._placements.parameters is ShardPlacement.SHARDED:
            return param.parameter.detach()[: param.layout.owned_numel(self._comm.rank)]
        return self._local_elements(param)

    @torch.no_grad()
    def publish(self, names: Iterable[str]) -> None:
        """Write the leaves ``names`` back to the parameters after an optimizer step.

        This is a collective at stages 1 and 2. Stages 1 and 2 all-gather the updated shards into the parameters. Stages
        0 and 3 only cast master weights.
        """
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
            # A rank whose shard is empty edited nothing, but must refuse a stale graph as the other ranks do.
            torch.autograd.graph.increment_version(parameter)
            self._record_version(self._model_params[name])

    def _record_version(self, param: ModelParam) -> None:
        """Record that the engine has changed the parameter, so that no check reports the change as a user's edit."""
        if self._unsharder is not None:
            self._unsharder.record_version(param.parameter)
        elif param.name in self._known_versions:
            self._known_versions[param.name] = param.parameter._version

    def _all_gather_shards(self, names: Container[str]) -> None:
        """All-gather the leaves ``names`` of all ranks into the replicated parameters, bucket by bucket."""
        for bucket in (bucket.select(names) for bucket in self._buckets):
            if bucket.members:
                dtype = bucket.members[0].dtypes.param_dtype
                row = bucket.pack_shards(self.leaves[param.name].to(dtype) for param in bucket.members)
                rows = all_gather_rows(row, self._comm)
                bucket.unpack_rows(rows, [param.parameter.detach() for param in bucket.members])

    def allow_uneven_ranks(self) -> AbstractContextManager[None]:
        """Let ranks read different parameters inside the block, on behalf of ``Engine.uneven``."""
        return self._collectives.allow_uneven_ranks()

    def check_ready_to_step(self) -> None:
        """Raise UsageError inside ``gathered`` or ``uneven``, or if a step would undo a user's in-place edit."""
        self._collectives.agreement.require_even("a step")
        if self._unsharder is not None:
            self._unsharder.refuse_lost_edits()
            return
        for name, version in self._known_versions.items():
            if self._model_params[name].parameter._version != version:
                raise UsageError(
                    f"parameter {name!r} was edited in place, but its master weight keeps the old values and would "
                    "undo the edit; edit it inside `with engine.gathered():`, or load_checkpoint"
                )

    @contextmanager
    def unshard_for_edit(
        self, selection: Iterable[str | nn.Parameter] | None, source: int
    ) -> Iterator[dict[str, Tensor]]:
        """Unshard parameters for edits inside the block, and write the edits back. Both ends are collectives."""
        selected = [self._find_param(entry) for entry in (self._model_params if selection is None else selection)]
        parameters = [param.parameter for param in selected]
        values = (
            [p.detach() for p in parameters]
            if self._unsharder is None
            else self._unsharder.unshard_for_edit(parameters)
        )
        before = [value.clone() for value in values] if self._unsharder is None else []
        any_failed = torch.ones(1, dtype=torch.uint8, device=values[0].device if values else None)
        editable = {param.name: value for param, value in zip(selected, values, strict=True)}
        try:
            yield editable
            any_failed.zero_()
        finally:
            editable.clear()  # an edit after the block would be lost
            if self._unsharder is not None:
                self._unsharder.end_edit()
            self._comm.all_ranks.all_reduce(any_failed, op=dist.ReduceOp.MAX)
            if any_failed.any():
                for value, old, param in zip(values, before, selected, strict=False):
                    value.copy_(old)
                    self._record_version(param)
        if any_failed.any():
            raise UsageError("another rank raised inside gathered(), so the edits of all ranks are dropped")
        for param, value in zip(selected, values, strict=True):
            self._broadcast_edit(param, value, source)

    @torch.no_grad()
    def _broadcast_edit(self, param: ModelParam, value: Tensor, source: int) -> None:
        """Set the full parameter of every rank to rank ``source``'s ``value``. This is a collective.

        In a master weight, elements that were not edited keep their values, which are more precise.
        """
        broadcast_tensors([value], self._comm.all_ranks, source)
        if self._placements.parameters is ShardPlacement.REPLICATED:
            param.parameter.detach().copy_(value)
        start, stop = param.layout.shard_bounds(self._comm.rank)
        is_replicated = self._placements.optimizer_state is ShardPlacement.REPLICATED
        local, leaf = value if is_replicated else value.reshape(-1)[start:stop], self.leaves[param.name]
        leaf.copy_(torch.where(leaf.to(local.dtype) == local, leaf, local.to(leaf.dtype)))
        self.publish([param.name])

    def _find_param(self, selected: str | nn.Parameter) -> ModelParam:
        """Return the parameter whose name or Parameter is ``selected``. Raises UsageError if the model has none."""
        for param in self._model_params.values():
            if param.name == selected or param.parameter is selected:
                return param
        shown = selected if isinstance(selected, str) else f"a tensor of shape {tuple(selected.shape)}"
        raise UsageError.unknown_name("parameter", shown, self._model_params)

    @torch.no_grad()
    def full_params(self) -> dict[str, Tensor]:
        """Copy the full current weights, frozen weights as before a cast, to the CPU. This is a collective."""
        params = {name: param.parameter for name, param in self._model_params.items()}
        originals = {n: w for n, w in self.master_weights.items() if n in self._frozen and not params[n].requires_grad}
        full = self._gather_full_tensors(params, self._placements.parameters)
        return full | self._gather_full_tensors(originals, self._placements.optimizer_state)

    @torch.no_grad()
    def full_masters(self) -> dict[str, Tensor]:
        """Copy the full master weights of trained parameters to the CPU. This is a collective if they are sharded."""
        frozen = {n for n in self._frozen if not self._model_params[n].parameter.requires_grad}
        trained = {name: weight for name, weight in self.master_weights.items() if name not in frozen}
        return self._gather_full_tensors(trained, self._placements.optimizer_state)

    def _gather_full_tensors(self, tensors: Mapping[str, Tensor], placement: ShardPlacement) -> dict[str, Tensor]:
        """Return full copies of ``tensors`` on the CPU. This is a collective if ``placement`` is sharded."""
        if placement is ShardPlacement.REPLICATED:
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        return all_gather_full_tensors(
            {name: (shard, self._model_params[name].layout) for name, shard in tensors.items()}, self._comm
        )

    def close(self) -> None:
        """Restore the modules' classes without running a collective; sharded parameters stay sharded."""
        if self._class_swap is not None:
            self._class_swap.restore_classes()
        else:
            OWNED_MODULES.difference_update(self._owned_modules)

    def mark_modules_owned(self) -> None:
        """Make other engines refuse these modules until ``close``, or forever if the parameters are sharded."""
        OWNED_MODULES.update(self._owned_modules)


def _shard_in_place(param: ModelParam, rank: int) -> None:
    """Replace the parameter's data by this rank's shard, padded to the common length of all ranks' shards."""
    layout = param.layout
    start, stop = layout.shard_bounds(rank)
    shard = param.parameter.detach().new_zeros(layout.shard_length)
    shard[: stop - start] = param.parameter.detach().reshape(-1)[start:stop]
    # A graph older than the engine may hold the parameter's gradient accumulator, which expects the full shape.
    # Autograd makes a new accumulator only if the dtype changes, so change it for a moment.
    other_dtype = torch.float32 if shard.dtype == torch.float64 else torch.float64
    param.parameter.data = shard.new_empty(0, dtype=other_dtype)
    param.parameter.data = shard
