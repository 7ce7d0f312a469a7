"""Mutants that unshard weights too early, cache unsharded weights, or keep them after use."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from zharness import torch_private
from zharness.engines import (
    EngineConfig,
    fsdp2,
)
from zharness.engines.reference import ReferenceEngine
from zharness.engines.torch_engine import TorchEngine
from zharness.mutants import seams, seams_engines, seams_stage3
from zharness.mutants.mutant import (
    FaultKind,
    Origin,
    Target,
    mutant,
    mutant_factory,
)
from zharness.mutants.wrapper import EngineWrapper
from zharness.parity import Part


class Older(torch.autograd.Function):
    """An autograd Function that returns an older value of a weight, and passes the gradient to the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, before: Tensor) -> Tensor:
        return before.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


@mutant(
    FaultKind.STALE, Target("training.trajectory", Part.GATHER, variant="sgd", parameter="loss"), origin=Origin.SHARDS
)
class ForwardsWithTheWeightsBefore(EngineWrapper):
    """Computes its forward with the weights from before the last step, as if it had unsharded them too early."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.before = {name: p.detach().clone() for name, p in self.module.named_parameters()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stale = {name: Older.apply(p, self.before[name]) for name, p in self.module.named_parameters()}  # type: ignore[no-untyped-call]
        return torch.func.functional_call(self.module, stale, args, kwargs)

    def step(self) -> None:
        self.before = {name: p.detach().clone() for name, p in self.module.named_parameters()}
        self.base.step()


class _KeepsEvaluation(ReferenceEngine):
    """A ReferenceEngine that keeps unsharded weights after a forward under ``no_grad``."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.evaluating, self.kept = False, list[Tensor]()

        def wrap(count: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
            def keep(full: Tensor) -> Any:
                if self.evaluating:
                    self.kept.append(full.detach())
                return count(full)

            return keep

        seams.wrap_count_unsharded(self, wrap)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.evaluating = not torch.is_grad_enabled()
        if self.evaluating:
            self.kept.clear()
        try:
            return super().__call__(*args, **kwargs)
        finally:
            self.evaluating = False

    def step(self) -> None:
        super().step()
        self.kept.clear()


@mutant_factory(
    FaultKind.RESOURCES,
    Target("training.forward_alone", Part.GATHER, variant="no_grad"),
    wraps="reference",
    stages=(3,),
    origin=Origin.BLIND_1,
)
def evaluation_keeps_weights(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 3, keeps weights unsharded after a forward under ``no_grad`` until the next step or evaluation.

    After an evaluation every rank holds the whole model (``gathered_bytes`` is not 0), and the next training forward
    has a peak memory that is larger by the size of the model.
    """
    return seams.build(model, config, _KeepsEvaluation)


@mutant_factory(
    FaultKind.RESOURCES,
    Target("training.forward_alone", Part.GATHER, variant="no_grad"),
    wraps="reference",
    stages=(3,),
    origin=Origin.BLIND_2,
)
def evaluation_stays_gathered(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 3, keeps a prefetched bucket after a forward under ``no_grad`` until the next backward frees it.

    ``gathered_bytes`` stays above 0 after an evaluation, because full weights are kept between steps.
    """
    engine = seams.build(model, config)

    def wrap(clear: Callable[[], None]) -> Callable[[], None]:
        return lambda: clear() if torch.is_grad_enabled() else None

    seams_stage3.wrap_clear_after_forward(engine, wrap)
    return engine


@mutant_factory(
    FaultKind.STALE,
    Target("training.forward_alone", Part.GATHER, variant="no_grad"),
    wraps="reference",
    stages=(3,),
    origin=Origin.BLIND_3,
)
def evaluation_leaves_prefetch(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 3, keeps prefetched weights after a forward under ``no_grad`` until a training forward ends.

    The prefetched weights are used even if a step has changed the weights: after an evaluation between backward and
    step, the next forward reads the weights from before the step. Unsharded bytes are kept between steps after every
    evaluation.
    """
    engine, kept = seams.build(model, config), SimpleNamespace(after_evaluation=False)

    def wrap_clear(clear: Callable[[], None]) -> Callable[[], None]:
        return lambda: None if kept.after_evaluation else clear()

    def wrap_clear_after_forward(clear: Callable[[], None]) -> Callable[[], None]:
        def clear_after_training() -> None:
            kept.after_evaluation = not torch.is_grad_enabled()
            clear()

        return clear_after_training

    def wrap_all_gather(
        all_gather: Callable[..., seams_stage3.PrefetchedBucket],
    ) -> Callable[..., seams_stage3.PrefetchedBucket]:
        def all_gather_unversioned(bucket: seams.Bucket, dtype: torch.dtype) -> seams_stage3.PrefetchedBucket:
            prefetched = all_gather(bucket, dtype)

            def contains(param: seams.ModelParam, dtype: torch.dtype) -> bool:
                return dtype == prefetched.dtype and param.name in prefetched.shards

            seams.replace_attribute(prefetched, "contains", contains)
            return prefetched

        return all_gather_unversioned

    if config.stage == 3:
        seams_stage3.wrap_clear_prefetched(engine, wrap_clear)
        seams_stage3.wrap_clear_after_forward(engine, wrap_clear_after_forward)
        seams_stage3.wrap_all_gather_bucket(engine, wrap_all_gather)
    return engine


PERSISTENT = 100_000


@mutant_factory(
    FaultKind.STALE,
    Target("state.resume", Part.FORWARD, variant="adamw", parameter="loss"),
    wraps="reference",
    stages=(3,),
    origin=Origin.BLIND_5,
)
def stale_in_evaluation(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 3 in eval mode, caches unsharded parameters of up to 100,000 elements until the next step.

    A forward in eval mode after ``load``, or after an edit of the weights, still uses the older weights.
    """
    kept: dict[tuple[str, torch.dtype], Tensor] = {}

    class Evaluates(ReferenceEngine):
        def step(self) -> None:
            super().step()
            kept.clear()

    engine = seams.build(model, config, Evaluates)

    def wrap(fetch: seams_stage3.Fetch) -> seams_stage3.Fetch:
        def fetch_once(param: seams.ModelParam, full: Tensor) -> None:
            key = param.name, full.dtype
            if engine.module.training or param.layout.numel > PERSISTENT:
                fetch(param, full)
            elif key in kept:
                full.copy_(kept[key])
            else:
                fetch(param, full)
                kept[key] = full.clone()

        return fetch_once

    seams_stage3.wrap_fetch(engine, wrap)
    return engine


@mutant_factory(
    FaultKind.STALE,
    Target("training.forward_alone", Part.GATHER, variant="no_grad"),
    wraps="fsdp2",
    stages=(3,),
    origin=Origin.BLIND_1,
)
def fsdp2_evaluation_goes_stale(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """At stage 3, leaves FSDP2's weights unsharded after a forward under ``no_grad`` until a backward frees them.

    After an evaluation between backward and step, the next forward uses the weights from before the step, and until
    then every rank holds the whole model.
    """
    engine = fsdp2.factory(model, config)

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        def forward_and_unshard(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if config.stage == 3 and not torch.is_grad_enabled():
                for module in filter(fsdp2.is_sharded, model.modules()):
                    cast(Any, module).unshard()
            return output

        return forward_and_unshard

    seams_engines.wrap_forward(engine, wrap)
    return engine


@mutant_factory(
    FaultKind.STALE,
    Target("training.forward_alone", Part.GATHER, variant="no_grad", parameter="loss"),
    wraps="fsdp2",
    stages=(3,),
    origin=Origin.BLIND_6,
)
def eval_leaves_weights_gathered(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """At stage 3, leaves FSDP2's weights unsharded after a forward under ``no_grad``.

    The unsharded weights use as much memory as the whole model, and the next forward after a step, a load or an edit
    still uses them.
    """

    class Lazy(TorchEngine):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            output = super().__call__(*args, **kwargs)
            if not torch.is_grad_enabled() and config.stage == 3:
                for module in self.module.modules():
                    if fsdp2.is_sharded(module):
                        cast("Any", module).unshard()
            return output

    engine = fsdp2.factory(model, config)
    engine.__class__ = Lazy
    return engine


@mutant_factory(
    FaultKind.GRAPH,
    Target("parameters.branch", None, model="changing", cause="missing ['by_attribute.weight']"),
    wraps="reference",
    stages=(3,),
    origin=Origin.BLIND_2,
)
def no_grad_read_is_cached(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 3, caches an unsharded weight until the module's forward ends, even if it was read under ``no_grad``.

    If a forward reads its weight under ``no_grad`` first (for a norm, a statistic), the weight is no longer trained.
    """
    engine = seams.build(model, config)

    def wrap(unshard: seams_stage3.Unshard) -> seams_stage3.Unshard:
        def unshard_and_cache(value: Any) -> Any:
            full, forward = unshard(value), seams_stage3.running_forward(engine)
            plain = full is value or seams_stage3.is_open_for_edit(engine, value) or torch_private.is_transforming()
            if forward is not None and not plain and not torch.is_grad_enabled():
                forward.tensors_by_read.setdefault((seams_stage3.sharded_name(engine, value), full.dtype, True), full)
            return full

        return unshard_and_cache

    seams_stage3.wrap_unshard(engine, wrap)
    return engine


class _ByName(dict[Any, Any]):
    """A dictionary whose keys are pairs of a name and a grad mode; pairs with the same name are the same key."""

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(key[0])

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key[0])

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key[0], value)


@mutant_factory(
    FaultKind.GRAPH,
    Target("parameters.branch", None, model="changing", cause="missing ['by_attribute.weight']"),
    wraps="reference",
    stages=(3,),
    origin=Origin.BLIND_4,
)
def stand_in_of_no_grad(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 3, caches the tensor that collects a weight's gradient by the weight's name, ignoring the grad mode.

    If a forward reads a weight under ``no_grad`` first (for a target, in a reentrant checkpoint) and then with
    gradients, the weight gets no gradient from that forward.
    """
    engine = seams.build(model, config)
    seams_stage3.replace_grad_placeholders(engine, _ByName())
    return engine


@mutant(
    FaultKind.STALE,
    Target("training.any_order", Part.FORWARD, variant="interrupted_load", parameter="output"),
    origin=Origin.ORDERS,
)
class TakesWhatAFailedBackwardGathered(EngineWrapper):
    """Runs a forward with weights that a failed backward prefetched, even if other weights were loaded since."""

    stages = (3,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.ahead: dict[str, Tensor] = {}

        def wrap(fetch: seams_stage3.Fetch) -> seams_stage3.Fetch:
            def fetch_leftover(param: seams.ModelParam, full: Tensor) -> None:
                fetch(param, full)
                if param.name in self.ahead:
                    seams.copy_shards_to_full(self.ahead.pop(param.name), full, param.layout)

            return fetch_leftover

        seams_stage3.wrap_fetch(self.base, wrap)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        try:
            self.base.backward(loss, retain_graph=retain_graph)
        except Exception:
            self.ahead = dict(seams_stage3.prefetched_shards(self.base))
            raise
