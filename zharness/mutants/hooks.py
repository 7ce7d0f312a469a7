"""Mutants that register, skip or keep hooks wrongly, or that do too much work in hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import (
    EngineConfig,
    ddp,
)
from zharness.engines.reference import ReferenceEngine
from zharness.engines.torch_engine import TorchEngine
from zharness.mutants import seams, seams_engines
from zharness.mutants.mutant import (
    FaultKind,
    Origin,
    Target,
    deepspeed,
    mutant,
    mutant_factory,
)
from zharness.mutants.wrapper import EngineWrapper, in_backward
from zharness.parity import Part


@mutant(
    FaultKind.RESOURCES,
    Target("resources.hook_count", parameter="calls"),
    origin=Origin.RESOURCES,
    imitates=deepspeed(7882),
)
class LooksAtAllForEach(EngineWrapper):
    """Visits all parameters for each parameter, so that the work grows with the square of their number."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(loss, retain_graph=retain_graph)
        parameters = list(self.module.parameters())
        for _ in parameters:
            for other in parameters:
                other.numel()


@mutant(FaultKind.RESOURCES, Target("resources.hook_count", parameter="recomputed"), origin=Origin.RESOURCES)
class LooksAtAllWhenItRecomputes(EngineWrapper):
    """Visits every module for each module that a backward recomputes."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for module in self.module.modules():
            module.register_forward_pre_hook(self.look)

    def look(self, *_: Any) -> None:
        """Read an attribute of every module of the model if a backward is running."""
        if in_backward() != -1:
            for module in self.module.modules():
                module.extra_repr()


def unchanged(grad: Tensor) -> Tensor:
    """Return ``grad`` unchanged."""
    return grad


@mutant(FaultKind.RESOURCES, Target("resources.hook_count", parameter="trained"), origin=Origin.ONLOOKERS)
class WatchesEveryForwardAnew(EngineWrapper):
    """Registers new hooks on all parameters in each forward, and never removes them."""

    wraps = "ddp"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for parameter in self.module.parameters():
            if parameter.requires_grad and torch.is_grad_enabled():
                parameter.register_hook(unchanged)  # type: ignore[no-untyped-call]
        return self.base(*args, **kwargs)


@mutant(
    FaultKind.GRAPH,
    Target("precision.autocast_policy", None, model="mixed", cause="dtypes has the wrong names"),
    origin=Origin.ONLOOKERS,
)
class SkipsTheModelsHooks(EngineWrapper):
    """Runs the model's forward without the forward hooks that the user has registered on the model."""

    wraps = "ddp"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hooks = seams_engines.forward_hooks(self.module)
        kept = dict(hooks)
        hooks.clear()
        try:
            return self.base(*args, **kwargs)
        finally:
            hooks.update(kept)


def averaged(grad: Tensor) -> Tensor:
    """Return the mean of ``grad`` over ranks; DDP's own reduction of this mean does not change it."""
    mean = grad.clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


@mutant(FaultKind.RESOURCES, Target("resources.close", Part.LOCAL_GRADIENT, model="exact"), origin=Origin.ONLOOKERS)
class LeavesItsHooks(EngineWrapper):
    """Does not remove its hooks in ``close``, so that they still reduce each gradient when it is computed."""

    wraps = "ddp"

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(averaged)  # type: ignore[no-untyped-call]


_SEEN: list[tuple[Callable[..., Any], torch.optim.Optimizer]] = []


@mutant_factory(
    FaultKind.RESOURCES,
    Target("resources.close", Part.GATHER, model="exact", parameter="model"),
    wraps="ddp",
    stages=(0,),
    origin=Origin.BLIND_1,
)
def ddp_closed_but_held(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Keeps the DDP reducer, the buckets and the optimizer state of every engine in memory after ``close``.

    ``close`` should release everything, but the memory and DDP's hooks on the parameters are never released.
    """
    engine = ddp.factory(model, config)
    _SEEN.append((seams_engines.ddp_wrapper(engine), seams_engines.optimizer(engine)))
    return engine


@mutant_factory(
    FaultKind.RESOURCES,
    Target("resources.close", None, model="exact", cause="own has the wrong names: missing ['first.bias'"),
    wraps="reference",
    stages=(2,),
    origin=Origin.BLIND_5,
)
def hooks_after_close(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Drops the gradients in ``close``, but does not remove the hooks that reduce gradients and clear ``grad``.

    If plain PyTorch trains the model after ``close``, the parameters have no gradients.
    """
    engine = seams.build(model, config)
    seams.keep_hooks_at_close(engine)
    return engine


@mutant_factory(
    FaultKind.RESOURCES,
    Target("resources.close", None, model="exact", cause="own has the wrong names"),
    wraps="reference",
    stages=(2,),
    origin=Origin.BLIND_6,
)
def close_leaves_hooks(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Drops the gradients of stage 2 in ``close``, but keeps the hooks on the parameters that reduce gradients.

    If the caller then trains the module with plain PyTorch, ``grad`` is None, because the hooks clear it.
    """
    engine = seams.build(model, config)
    seams.keep_hooks_at_close(engine)
    return engine


@mutant(
    FaultKind.RESOURCES,
    Target("training.modes", Part.FORWARD, model="stateful", parameter="calls of a forward hook*"),
    origin=Origin.BLIND_9,
)
class SkipsHooksOfTheModel(EngineWrapper):
    """Runs the model without the forward hooks on the model itself, like a direct call of ``model.forward``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with seams_engines.without_forward_hooks(self.module):
            return self.base(*args, **kwargs)
