"""Mutants that split, reduce, gather or report shards wrongly."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import (
    EngineConfig,
    Piece,
    Reduction,
    fsdp2,
)
from zharness.engines.reference import ReferenceEngine
from zharness.engines.torch_engine import TorchEngine
from zharness.mutants import seams, seams_engines
from zharness.mutants.mutant import (
    SHARDED_STAGES,
    FaultKind,
    Origin,
    Target,
    mutant,
    mutant_factory,
)
from zharness.mutants.wrapper import EngineWrapper
from zharness.parity import Part


@mutant(FaultKind.SHARDS, Target("training.trajectory", Part.GATHER, variant="sgd", dtype="bf16"), origin=Origin.SHARDS)
class PublishesInTheWrongOrder(EngineWrapper):
    """Writes each updated shard of a weight to the position of the next rank's shard."""

    stages = (1,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)

        def wrap(all_gather: Callable[..., None]) -> Callable[..., None]:
            def shift(names: Container[str]) -> None:
                all_gather(names)
                with torch.no_grad():
                    for parameter in self.module.parameters():
                        parameter.copy_(parameter.reshape(-1).roll(-(-parameter.numel() // 2)).view_as(parameter))

            return shift

        seams.wrap_all_gather_shards(self.base, wrap)


class ReducedShards(EngineWrapper, ABC):
    """The base class of mutants that change each gradient shard after its reduction."""

    stages = (2,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)

        def wrap(reduce: seams.ReduceBucket) -> seams.ReduceBucket:
            return lambda bucket: [self.changed(shard) for shard in reduce(bucket)]

        seams.wrap_reduce_bucket(self.base, wrap)

    @abstractmethod
    def changed(self, shard: Tensor) -> Tensor:
        """Return the gradient shard that replaces ``shard`` on this rank."""


@mutant(FaultKind.SHARDS, Target("training.grads"), origin=Origin.SHARDS)
class LosesTheShardsEdge(ReducedShards):
    """Sets the last element of each rank's gradient shard to zero."""

    def changed(self, shard: Tensor) -> Tensor:
        shard[-1:] = 0
        return shard


@mutant(FaultKind.SHARDS, Target("training.grads"), origin=Origin.SHARDS)
class SlipsByOneElement(ReducedShards):
    """Shifts each rank's gradient shard by one element."""

    def changed(self, shard: Tensor) -> Tensor:
        return shard.roll(1)


@mutant(FaultKind.SHARDS, Target("training.sgd_step", Part.OPTIMIZER, parameter="first.bias"), origin=Origin.SHARDS)
class DropsTheShortShard(EngineWrapper):
    """Never updates the short shard of a parameter whose number of elements is not a multiple of the world size."""

    stages = (3,)

    def step(self) -> None:
        leaves, rank = seams.leaves(self.base), dist.get_rank()
        kept = [
            (leaves[name], leaves[name].clone())
            for name, param in seams.model_params(self.base).items()
            if param.layout.owned_numel(rank) < param.layout.shard_length
        ]
        self.base.step()
        with torch.no_grad():
            for leaf, before in kept:
                leaf.copy_(before)
        seams.publish(self.base, leaves)


@mutant(
    FaultKind.STALE, Target("training.trajectory", Part.GATHER, variant="adamw", dtype="bf16"), origin=Origin.SHARDS
)
class NeverPublishes(EngineWrapper):
    """Never copies the optimizer's updated master weights to the model."""

    stages = (1,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        seams.replace_publish(self.base, lambda names: None)


@mutant(FaultKind.SHARDS, Target("training.sgd_step", Part.GATHER), origin=Origin.CIRCUMSTANCES)
class TellsItsShardsBackwards(EngineWrapper):
    """Reports a layout in which the owners of each parameter's shards are in reverse order."""

    stages = (3,)

    def layout(self) -> Mapping[str, tuple[Piece, ...]]:
        last = dist.get_world_size() - 1
        layout: Mapping[str, tuple[Piece, ...]] = self.base.layout()
        return {
            name: tuple(replace(piece, rank=last - piece.rank) for piece in pieces) for name, pieces in layout.items()
        }


def longer(piece: Piece, end: int) -> Piece:
    """Return ``piece`` extended by one element, unless it ends at ``end``."""
    return replace(piece, stop=min(piece.stop + 1, end))


@mutant(
    FaultKind.SHARDS,
    Target("training.sgd_step", None, model="mlp", cause="without the padding of shards"),
    origin=Origin.BLIND_9,
)
class ReportsThePadding(EngineWrapper):
    """Reports a layout in which the last shard of a parameter includes its padding."""

    stages = SHARDED_STAGES

    def layout(self) -> Mapping[str, tuple[Piece, ...]]:
        lengths = {name: param.layout.shard_length for name, param in seams.model_params(self.base).items()}
        layout: Mapping[str, tuple[Piece, ...]] = self.base.layout()
        return {
            name: tuple(replace(piece, stop=piece.start + lengths[name]) for piece in pieces)
            for name, pieces in layout.items()
        }


@mutant(FaultKind.SHARDS, Target("training.sgd_step", Part.GATHER), origin=Origin.CIRCUMSTANCES)
class TellsOverlappingShards(EngineWrapper):
    """Reports a layout in which each shard extends by one element into the next shard."""

    stages = (1, 2)

    def layout(self) -> Mapping[str, tuple[Piece, ...]]:
        layout: Mapping[str, tuple[Piece, ...]] = self.base.layout()
        return {name: tuple(longer(piece, pieces[-1].stop) for piece in pieces) for name, pieces in layout.items()}


@mutant_factory(
    FaultKind.SHARDS,
    Target("parameters.every_kind", model="odd", parameter="transposed"),
    wraps="reference",
    stages=SHARDED_STAGES,
    origin=Origin.BLIND_1,
)
def strided_in_memory_order(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """From stage 1 on, flattens gradients in the order of memory, but weights in the order of their indices.

    The gradient of a parameter that is not contiguous (channels_last, a transposed weight) is permuted.
    """
    engine = seams.build(model, config)

    def wrap(param: seams.ModelParam, cast: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        stride = param.layout.stride
        order = sorted(range(len(stride)), key=lambda d: -stride[d])
        if order == list(range(len(stride))):
            return cast
        return lambda grad: cast(grad.permute(order).reshape(param.layout.shape))

    if config.stage > 0:
        seams.wrap_cast_for_reduce(engine, wrap)
    return engine


@mutant_factory(
    FaultKind.SHARDS,
    Target("parameters.every_kind", Part.LOCAL_GRADIENT, model="odd", parameter="transposed"),
    wraps="reference",
    stages=(0, 1, 2),
    origin=Origin.BLIND_6,
)
def gradients_flat_as_they_lie(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Flattens gradients in the order of memory, but weights in the order of their indices.

    A transposed or channels_last parameter is updated with the gradients of other elements.
    """
    engine = seams.build(model, config)

    def flatten(gradient: Tensor) -> Tensor:
        if gradient.layout is not torch.strided or gradient.is_contiguous():
            return gradient
        dense = 1
        for stride, size in sorted(zip(gradient.stride(), gradient.shape, strict=True)):
            if size != 1 and stride != dense:
                return gradient
            dense *= size
        return gradient.as_strided((gradient.numel(),), (1,)).view(gradient.shape)

    seams.change_local_grads(engine, flatten)
    return engine


class _UnpacksInMemoryOrder(seams.Bucket):
    def select(self, names: Container[str]) -> seams.Bucket:
        return _UnpacksInMemoryOrder(super().select(names).members)

    def unpack_rows(self, rows: Tensor, full_tensors: Sequence[Tensor]) -> None:
        parts = torch.split(rows, self.shard_lengths, dim=1)
        for part, full, param in zip(parts, full_tensors, self.members, strict=True):
            if full.is_contiguous() or full.stride() != param.layout.stride:
                seams.copy_shards_to_full(part, full, param.layout)
            else:
                full.as_strided((full.numel(),), (1,)).copy_(part.reshape(-1)[: full.numel()])


@mutant_factory(
    FaultKind.SHARDS,
    Target("parameters.unfrozen", Part.OPTIMIZER, model="odd", parameter="transposed"),
    wraps="reference",
    stages=(1, 2),
    origin=Origin.BLIND_5,
)
def permuted_weights_mixed_up(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Writes shards back after a step in the order of memory, although they were cut in the order of the indices.

    The elements of a parameter with permuted strides (channels_last, a transposed weight) are exchanged.
    """
    engine = seams.build(model, config)
    seams.replace_publish_buckets(engine, lambda bucket: _UnpacksInMemoryOrder(bucket.members))
    return engine


@mutant_factory(
    FaultKind.SHARDS,
    Target("parameters.unfrozen", Part.OPTIMIZER, model="odd"),
    wraps="reference",
    stages=SHARDED_STAGES,
    origin=Origin.BLIND_3,
)
def empty_shard_ends_update(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stages 1 to 3, ends the loop over a rank's gradient shards at an empty shard instead of skipping this shard.

    A rank that owns no element of a small parameter updates its shards of all later parameters with zeros.
    """
    engine = seams.build(model, config)

    def stop_at_empty(*_: Any) -> None:
        stopped = False
        for leaf in seams.leaves(engine).values():
            stopped = stopped or (leaf.grad is not None and not leaf.grad.numel())
            if stopped and leaf.grad is not None:
                leaf.grad = torch.zeros_like(leaf.grad)

    if config.stage:
        seams_engines.optimizer(engine).register_step_pre_hook(stop_at_empty)
    return engine


@mutant_factory(
    FaultKind.SHARDS,
    Target("training.trajectory", Part.GATHER, variant="adamw", dtype="bf16"),
    wraps="reference",
    stages=(1, 2),
    origin=Origin.BLIND_4,
)
def tail_not_published(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stages 1 and 2, all-gathers after a step only n // N of a parameter's n elements from each of N ranks.

    The last n % N elements of a parameter keep their old values on the ranks that do not own them.
    """
    engine = seams.build(model, config)

    def wrap(all_gather: Callable[..., None]) -> Callable[..., None]:
        @torch.no_grad()
        def all_gather_even_part(names: Container[str]) -> None:
            missed = []
            for param in seams.model_params(engine).values():
                rest = param.layout.numel % param.layout.world_size
                if rest and param.name in names:
                    values = param.parameter.detach()
                    missed.append((values, rest, values.reshape(-1)[-rest:].clone()))
            all_gather(names)
            for values, rest, tail in missed:
                flat = values.reshape(-1).clone()
                flat[-rest:] = tail
                values.copy_(flat.view(values.shape))

        return all_gather_even_part

    seams.wrap_all_gather_shards(engine, wrap)
    return engine


@mutant_factory(
    FaultKind.SCALE,
    Target("parameters.every_kind", model="odd"),
    wraps="reference",
    stages=(1, 2),
    origin=Origin.BLIND_2,
)
def tiny_parameters_are_not_averaged(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stages 1 and 2, does not reduce parameters with fewer elements than ranks.

    The owner of each element uses the gradient of its own micro-batch, so scalars and the bias of a head with one
    output learn from the data of one rank.
    """
    engine = seams.build(model, config)
    comm = seams.comm(engine)
    factor = comm.world_size if config.reduction is Reduction.MEAN else 1

    def wrap(reduce: seams.ReduceBucket) -> seams.ReduceBucket:
        def reduce_large(bucket: seams.Bucket) -> list[Tensor]:
            for param in bucket.members:
                grad = param.parameter.grad
                if param.layout.numel < comm.world_size and grad is not None and grad.layout is torch.strided:
                    start, stop = param.layout.shard_bounds(comm.rank)
                    own = torch.zeros_like(grad, memory_format=torch.contiguous_format)
                    own.view(-1)[start:stop] = grad.detach().reshape(-1)[start:stop] * factor
                    param.parameter.grad = own
            return reduce(bucket)

        return reduce_large

    if config.stage in (1, 2):
        seams.wrap_reduce_bucket(engine, wrap)
    return engine


@mutant_factory(
    FaultKind.SHARDS,
    Target("training.sgd_step", Part.GATHER, parameter="first.*"),
    wraps="fsdp2",
    stages=(2, 3),
    origin=Origin.BLIND_2,
)
def fsdp2_layout_of_an_even_split(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Reports in ``layout`` that rank r owns rows ``n*r//N`` to ``n*(r+1)//N``, but FSDP2 cuts like ``torch.chunk``.

    The reported owners are wrong if the world size N does not divide the number of rows n.
    """
    engine = fsdp2.factory(model, config)
    ranks, params = dist.get_world_size(), seams_engines.params(engine)

    def split_evenly(shape: tuple[int, ...]) -> tuple[Piece, ...]:
        rows, row = shape[0], math.prod(shape[1:])
        edges = [(rows * rank // ranks * row, rows * (rank + 1) // ranks * row) for rank in range(ranks)]
        return tuple(Piece(rank, start, stop) for rank, (start, stop) in enumerate(edges) if start < stop)

    seams_engines.replace_layout(engine, {name: split_evenly(tuple(params[name].shape)) for name in engine.layout()})
    return engine
