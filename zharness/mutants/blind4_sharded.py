"""Twelve bugs over the reference engine."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zharness import torch_private as private
from zharness.engines import reference
from zharness.engines.protocol import Engine, EngineConfig
from zharness.engines.reference import ReferenceEngine
from zharness.reference.buckets import Bucket
from zharness.reference.inspection.coalesced_collectives import broadcast_tensors
from zharness.reference.layout import ModelParam
from zharness.reference.mixed_precision.precision import OnOverflow
from zharness.reference.uneven_ranks.negotiation import RequestKind


def first_rank_decides(model: nn.Module, config: EngineConfig) -> Engine:
    """Which parameters were used in a step is taken from rank 0 alone, not from all ranks (stages 0 to 2).

    What only other ranks used (an expert, a branch on data) loses its gradient, and the weight is not updated.
    """
    engine = reference.factory(model, config)
    gradients: Any = engine.engine._gradients

    def agree(candidates: Sequence[ModelParam], more: bool = False) -> tuple[set[str], bool]:
        flags = torch.tensor([*(o.parameter.grad is not None for o in candidates), more], dtype=torch.uint8)
        if candidates:
            gradients._wire.comm.broadcast(flags, 0)
        *used, further = flags.tolist()
        return {o.name for o, flag in zip(candidates, used, strict=True) if flag}, bool(further)

    if config.stage < 3:
        gradients._agree = agree
    return engine


def masters_rounded_on_load(model: nn.Module, config: EngineConfig) -> Engine:
    """``load`` makes the fp32 masters anew from the low-precision weights, so their lower bits are lost.

    A training that is continued is another than one that was never interrupted.
    """

    class Loads(ReferenceEngine):
        @torch.no_grad()
        def load(self, path: Path) -> None:
            super().load(path)
            parameters = self.engine._parameters
            for name, master in parameters.master_weights.items():
                master.copy_(parameters._make_leaf(parameters._model_params[name]))

    return Loads(reference.factory(model, config).engine)


def overflow_in_own_shard(model: nn.Module, config: EngineConfig) -> Engine:
    """At stage 3 a rank skips a step when its own shards of the gradient overflow, without asking the others.

    The others update theirs: weights of two different steps in one model, and loss scales that differ between ranks.
    """
    engine = reference.factory(model, config)
    core = engine.engine
    rescaling: Any = core._clipper
    together = rescaling.rescale

    def rescale(reduced: Mapping[str, Tensor]) -> bool:
        if together(reduced):
            return True
        if not all(bool(grad.isfinite().all()) for grad in reduced.values()):
            return False
        for grad in reduced.values():
            grad.div_(core.loss_scale)
        return True

    if config.stage == 3 and core.settings.precision.on_overflow is OnOverflow.SKIP:
        rescaling.rescale = rescale
    return engine


def undivided_second_order(model: nn.Module, config: EngineConfig) -> Engine:
    """At stage 3 the backward of the mean over ranks gathers what every rank has of it, but does not divide it by N.

    Under create_graph a penalty on the gradient of the weights gets a second-order term that is N times too large.
    """
    engine = reference.factory(model, config)
    channel: Any = engine.engine._gradients._context.collectives

    def spread(original: ModelParam, shard: Tensor) -> Tensor:
        whole: Tensor = channel._collect(RequestKind.ALL_GATHER_GRAD, original, shard)
        return whole

    channel.spread = spread
    return engine


def constants_in_transforms(model: nn.Module, config: EngineConfig) -> Engine:
    """At stage 3 a weight that is read inside a torch.func transform is a constant.

    A loss on a derivative by torch.func (of the output by the input, say) gives that weight no gradient.
    """
    engine = reference.factory(model, config)
    reader: Any = engine.engine._parameters._unsharder
    if reader is not None:
        plain = reader.read

        def read(value: Any) -> Any:
            got = plain(value)
            return got.detach() if got is not value and private.is_transforming() else got

        reader.read = read
    return engine


class _ByName(dict[Any, Any]):
    """A table with keys (name, whether gradients are recorded) that forgets the second half."""

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(key[0])

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key[0])

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key[0], value)


def stand_in_of_no_grad(model: nn.Module, config: EngineConfig) -> Engine:
    """At stage 3 what collects a weight's gradient is cached for one forward by name, recording gradients or not.

    A weight that a forward reads under no_grad first (a target, a reentrant checkpoint) and then with gradients gets
    none of that forward.
    """
    engine = reference.factory(model, config)
    reader: Any = engine.engine._parameters._unsharder
    if reader is not None:
        reader._stands = _ByName()
    return engine


def tail_not_published(model: nn.Module, config: EngineConfig) -> Engine:
    """At stages 1 and 2 what is gathered after a step is n // N elements of each of N ranks: the remainder is missed.

    The last n % N elements of a parameter keep their old values on the ranks that do not own them.
    """
    engine = reference.factory(model, config)
    parameters: Any = engine.engine._parameters
    whole = parameters._share_shards

    @torch.no_grad()
    def share_shards(names: Container[str]) -> None:
        missed = []
        for original in parameters._originals.values():
            rest = original.layout.numel % original.layout.ranks
            if rest and original.name in names:
                values = original.parameter.detach()
                missed.append((values, rest, values.reshape(-1)[-rest:].clone()))
        whole(names)
        for values, rest, tail in missed:
            flat = values.reshape(-1).clone()
            flat[-rest:] = tail
            values.copy_(flat.view(values.shape))

    parameters._share_shards = share_shards
    return engine


def one_step_count_for_all(model: nn.Module, config: EngineConfig) -> Engine:
    """Adam's count of steps is the engine's, one for all parameters, as in fused optimizers that keep it by group.

    A parameter that was not used in some step is corrected for a step that it never made.
    """
    engine = reference.factory(model, config)
    core = engine.engine

    def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for state in optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"].fill_(core.steps)

    core.optimizer.register_step_pre_hook(count)
    return engine


def buffers_of_rank_0_after_load(model: nn.Module, config: EngineConfig) -> Engine:
    """``load`` gives every rank the buffers that rank 0 saved, though each rank had saved its own.

    The running statistics of the other ranks are not continued.
    """

    class Loads(ReferenceEngine):
        def load(self, path: Path) -> None:
            super().load(path)
            for buffer in self.engine._training_state._persistent_buffers().values():
                broadcast_tensors([buffer], self.engine.comm)

    return Loads(reference.factory(model, config).engine)


def gradients_in_whole_buffer(model: nn.Module, config: EngineConfig) -> Engine:
    """At stage 2 a reduced shard is a slice of a buffer for the whole bucket, which stays allocated with it.

    Every number is right, but gradients take all of the model's bytes on each rank, which is what stage 2 is to save.
    """
    engine = reference.factory(model, config)
    gradients: Any = engine.engine._gradients
    plain, comm = gradients._reduce, gradients._wire.comm

    def reduce(bucket: Bucket) -> list[Tensor]:
        shares = plain(bucket)
        row = bucket.pack_shards(shares)
        flat = row.new_empty(comm.world_size * row.numel())
        mine = flat[comm.rank * row.numel() :][: row.numel()].copy_(row)
        return bucket.split_shards(mine, comm.rank)

    if config.stage == 2:
        gradients._reduce = reduce
    return engine


def sparse_rows_overwritten(model: nn.Module, config: EngineConfig) -> Engine:
    """A sparse gradient is made dense by writing its rows, not by adding them up (stages 0 to 2).

    An embedding with sparse=True loses what a row that was looked up twice got from all but one of its uses.
    """
    engine = reference.factory(model, config)
    gradients: Any = engine.engine._gradients
    plain = gradients._reduce

    def reduce(bucket: Bucket) -> Any:
        for original in bucket.members:
            grad = original.parameter.grad
            if grad is not None and grad.is_sparse:
                dense = torch.zeros_like(original.parameter)
                dense[tuple(grad._indices())] = grad._values()
                original.parameter.grad = dense
        return plain(bucket)

    if config.stage < 3:
        gradients._reduce = reduce
    return engine


def unfrozen_not_reduced(model: nn.Module, config: EngineConfig) -> Engine:
    """What takes part in the reduction is decided at construction, by requires_grad.

    A parameter that is unfrozen later makes gradients and is never updated.
    """
    engine = reference.factory(model, config)
    gradients: Any = engine.engine._gradients
    trained = {name for name, original in gradients._originals.items() if original.parameter.requires_grad}
    plain = gradients._agree

    def agree(candidates: Sequence[ModelParam], more: bool = False) -> tuple[set[str], bool]:
        used, further = plain(candidates, more)
        return used & trained, further

    gradients._agree = agree
    return engine
