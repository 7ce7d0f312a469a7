"""Twelve bugs over the reference engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from zharness.engines import reference
from zharness.engines.protocol import Engine, EngineConfig, Reduction
from zharness.engines.reference import ReferenceEngine
from zharness.mutants import blind3_sharded
from zharness.reference.buckets import Bucket, copy_shards_to_full
from zharness.reference.gradients import GradientClipper, Gradients
from zharness.reference.layout import ModelParam, ShardPlacement
from zharness.reference.prefetch import Prefetcher


class _LowAccumulation(Gradients):
    @torch.no_grad()
    def _add(self, original: ModelParam, share: Tensor) -> None:
        super()._add(original, share)
        if original.has_master and self._placements.gradients is ShardPlacement.SHARDED:
            total = self._reduced_grads[original.name]
            self._reduced_grads[original.name] = total.to(original.dtypes.param_dtype).to(original.dtypes.master_dtype)


def accumulates_in_model_dtype(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """The buffer in which sharded gradients of micro-batches add up has the model's dtype and not the masters'.

    Wrong: small gradients of later micro-batches are rounded away, though the optimizer is promised fp32 gradients.
    """
    made = reference.factory(model, config)
    made.engine._gradients.__class__ = _LowAccumulation
    return made


def penalty_undivided(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Double backward at stage 3: the adjoint of "reduce to the mean" spreads the gradient without dividing it.

    Wrong: a gradient penalty on the parameters has a gradient that is as many times too large as there are ranks.
    """
    made = reference.factory(model, config)
    channel: Any = made.engine._gradients._context.collectives
    right = channel.spread

    def undivided(original: ModelParam, shard: Tensor) -> Tensor:
        whole: Tensor = right(original, shard)
        factor: float = channel._divisor_of(original) * original.predivide_factor
        return whole * factor

    channel.spread = undivided
    return made


class _ClipsScaled(GradientClipper):
    def rescale(self, reduced: Mapping[str, Tensor]) -> bool:
        self.norm, scale = None, self._loss_scale.value
        if self._max_norm is not None or self._skips_on_overflow or self._loss_scale.is_needed():
            self.norm = self._gradients.norm() / scale
        finite = self._gradients.is_finite() if self.norm is None else math.isfinite(self.norm)
        factor = 1.0 / scale
        if self._max_norm is not None and self.norm is not None:
            factor *= min(1.0, self._max_norm / (self.norm * scale + 1e-6))
        if finite and factor != 1.0:
            for grad in reduced.values():
                grad.mul_(factor)
        return finite


def clips_before_unscaling(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """The clipping factor comes from the norm of the gradients as they are scaled; the norm that is told is right.

    Wrong: under a loss scale gradients far below the limit are clipped, by up to the loss scale.
    """
    made = reference.factory(model, config)
    made.engine._clipper.__class__ = _ClipsScaled
    return made


class _OldRates(ReferenceEngine):
    def load(self, path: Path) -> None:
        groups = self.engine.optimizer.param_groups
        before = [group["lr"] for group in groups]
        super().load(path)
        for group, rate in zip(self.engine.optimizer.param_groups, before, strict=True):
            group["lr"] = rate


def first_rate_after_load(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """``load`` restores where the schedule was, but the groups keep their learning rates until its next step.

    Wrong: the first step after a load is made with the rate of the engine that loads, not with the one saved.
    """
    made = reference.factory(model, config)
    made.__class__ = _OldRates
    return made


def load_keeps_gradients(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """``load`` forgets neither the gradients that wait nor the micro-batches that were counted.

    Wrong: what was accumulated before the load, at other weights, is added to the first step after it.
    """
    made = reference.factory(model, config)
    engine: Any = made.engine

    def go_on(contents: Any, pieces: Mapping[str, Tensor], module_only: bool = False) -> None:
        engine._state.adopt(contents, pieces, module_only)
        if not module_only:
            engine.steps, engine.skipped_steps = contents.steps, contents.skipped_steps

    engine._go_on = go_on
    return made


PERSISTENT = 100_000


class _Evaluates(ReferenceEngine):
    kept: dict[tuple[str, torch.dtype], Tensor]

    def step(self) -> None:
        super().step()
        self.kept.clear()


def stale_in_evaluation(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Stage 3 keeps gathered parameters of up to 100 000 elements while the module is in eval mode, until a step.

    Wrong: a forward in eval mode after ``load``, or after an edit of the weights, still uses the weights before it.
    """
    made = _Evaluates(reference.factory(model, config).engine)
    kept = made.kept = {}
    engine, shelf = made.engine, cast(Any, made.engine._gradients._context.prefetcher)

    def fetch(original: ModelParam, full: Tensor) -> None:
        key = original.name, full.dtype
        if engine.module.training or original.layout.numel > PERSISTENT:
            Prefetcher.fetch_into(shelf, original, full)
        elif key in kept:
            full.copy_(kept[key])
        else:
            Prefetcher.fetch_into(shelf, original, full)
            kept[key] = full.clone()

    shelf.fetch = fetch
    return made


def own_weights_always(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Stage 3 finds the parameter to gather by module and attribute name, as they were when the engine was made.

    Wrong: ``torch.func.functional_call`` with other weights computes with the engine's, and those get the gradient.
    """
    made = reference.factory(model, config)
    exchange = made.engine._parameters._class_swap
    if exchange is None:
        return made
    modules = [module for module, _ in exchange._original_classes]
    owned = {(id(m), name): p for m in modules for name, p in m._parameters.items() if p is not None}
    reader = exchange._unsharder

    def reading(base: type[nn.Module]) -> Callable[[nn.Module, str], Any]:
        def read_attribute(self: nn.Module, name: str) -> Any:
            found = base.__getattr__(self, name)
            return reader.unshard_if_sharded(owned.get((id(self), name), found))

        return read_attribute

    for base, kind in exchange._sharded_classes.items():
        kind.__getattr__ = reading(base)  # type: ignore[method-assign]
    return made


class _InMemoryOrder(Bucket):
    def only(self, chosen: Container[str]) -> Bucket:
        return _InMemoryOrder(super().select(chosen).members)

    def spread(self, rows: Tensor, fulls: Sequence[Tensor]) -> None:
        for part, full, original in zip(torch.split(rows, self.shard_lengths, dim=1), fulls, self.members, strict=True):
            if full.is_contiguous() or full.stride() != original.layout.stride:
                copy_shards_to_full(part, full, original.layout)
            else:
                flat = full.as_strided((full.numel(),), (1,))
                flat.copy_(part.reshape(-1)[: full.numel()])


def permuted_weights_mixed_up(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """After a step the shards are written back in the order of memory; they were cut in the order of the indices.

    Wrong: a parameter whose strides are permuted (channels_last, a transposed weight) has its elements exchanged.
    """
    made = reference.factory(model, config)
    parameters: Any = made.engine._parameters
    parameters._buckets = tuple(_InMemoryOrder(bucket.members) for bucket in parameters._buckets)
    return made


class _PowerOfTwo(Gradients):
    def _divisor_of(self, original: ModelParam) -> float:
        if original.predivide_factor == 1:
            return super()._remaining_divisor(original)
        return self._context.divisor / self._context.comm.world_size


def mean_by_power_of_two(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Gradients are divided before an fp16 wire by the power of two above the world size, and that is taken as all.

    Wrong: with 3 ranks the mean is a quarter of the sum, and not a third.
    """
    made = reference.factory(model, config)
    if config.reduction is Reduction.MEAN:
        made.engine._gradients.__class__ = _PowerOfTwo
    return made


class _FirstTrained(Gradients):
    first_trained: set[str]

    def reduced(self) -> dict[str, Tensor]:
        found = super().reduce_pending()
        for name in found.keys() - self.first_trained:
            del self._reduced_grads[name]
        return {name: grad for name, grad in found.items() if name in self.first_trained}


def never_unfrozen(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """The engine takes gradients of those parameters that required one when it was made.

    Wrong: a parameter that is unfrozen later is silently never trained, though the engine claims it.
    """
    made = reference.factory(model, config)
    gradients: Any = made.engine._gradients
    gradients.first_trained = {n for n, o in made.engine._model_params.items() if o.parameter.requires_grad}
    gradients.__class__ = _FirstTrained
    return made


def forward_left_by_exception(model: nn.Module, config: EngineConfig) -> Engine:
    """Stage 3 does not clean up after a forward that raises: the modules in it are taken to be running for good.

    Wrong: the weights that they had gathered stay gathered, through ``zero_grad`` and all later steps.
    """
    return blind3_sharded.failed_forward_stays_open(model, config)


def hooks_after_close(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """``close`` forgets the gradients, and leaves on the parameters the hooks that take them away.

    Wrong: a model that is trained on by plain PyTorch, after ``close``, has no gradients: "release everything".
    """
    made = reference.factory(model, config)
    gradients: Any = made.engine._gradients
    gradients.close = gradients.forget
    return made
