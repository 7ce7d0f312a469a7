"""Broken on purpose, over DDP and FSDP2: each factory's engine has one bug, and is right wherever that sleeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import ddp, fsdp2
from zharness.engines.protocol import EngineConfig, Reduction
from zharness.engines.torch_engine import TorchEngine

_SEEN: list[tuple[Callable[..., Any], torch.optim.Optimizer]] = []


def ddp_no_sync_leaks(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """``no_sync`` over DDP does not switch synchronisation on again where its block raised.

    Wrong: a caller who catches the exception trains on with gradients that no rank shares, and the ranks drift apart.
    """
    engine = ddp.factory(model, config)
    wrapped: Any = engine._adapter.forward.__self__  # type: ignore[attr-defined]

    @contextmanager
    def off() -> Iterator[None]:
        before, wrapped.require_backward_grad_sync = wrapped.require_backward_grad_sync, False
        yield
        wrapped.require_backward_grad_sync = before

    engine._adapter = replace(engine._adapter, no_sync=off)
    return engine


def ddp_detaches_keywords(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Tensors that are given by keyword reach the module without their graph.

    Wrong: what is upstream of them (another model's output, an input whose gradient is wanted) gets no gradient.
    """
    engine = ddp.factory(model, config)
    forward = engine._adapter.forward

    def called(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **{k: v.detach() if isinstance(v, Tensor) else v for k, v in kwargs.items()})

    engine._adapter = replace(engine._adapter, forward=called)
    return engine


def ddp_schedule_wraps(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """After its last factor the learning-rate schedule begins again with the first.

    Wrong, since "the last factor holds for all later steps": a warm-up of three factors restarts in the fourth step.
    """
    engine, factors = ddp.factory(model, config), config.optimizer.schedule
    wrapping = torch.optim.lr_scheduler.LambdaLR(engine._optimizer, lambda step: factors[step % len(factors)])
    engine._schedule = wrapping
    return engine


def ddp_closed_but_held(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """A list of all engines that were made keeps DDP's reducer, its buckets and the optimizer's state after ``close``.

    Wrong, since ``close`` releases everything: here the memory, and DDP's hooks on the parameters, stay for good.
    """
    engine = ddp.factory(model, config)
    _SEEN.append((engine._adapter.forward, engine._optimizer))
    return engine


def fsdp2_forgets_once(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Only the first ``zero_grad`` after a ``no_sync`` block drops unreduced gradients; later ones leave them.

    Wrong, since ``zero_grad`` forgets every gradient: the next reduced backward adds those of a window given up.
    """
    engine = fsdp2.factory(model, config)
    forget: Any = engine._adapter.drop_gradients
    sync = forget.args[-1].__self__
    spent = False

    def once() -> None:
        nonlocal spent
        if sync._unreduced and not spent:
            spent = True
            forget()

    engine._adapter = replace(engine._adapter, drop_gradients=once)
    return engine


def fsdp2_root_averages(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Under reduction by sum, the parameters of the root's own group are averaged.

    Wrong: tied weights and parameters of the outermost module get a gradient that is N times too small.
    """
    engine: TorchEngine = fsdp2.factory(model, config)
    if config.reduction is Reduction.SUM:
        model.set_gradient_divide_factor(float(dist.get_world_size()))  # type: ignore[operator]
    return engine


def fsdp2_evaluation_goes_stale(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """At stage 3 a forward under ``no_grad`` leaves the weights gathered until a backward frees them.

    Wrong where a step follows before any backward does (an evaluation between backward and step): the next forward
    computes with the weights before that step, and meanwhile every rank holds the whole model.
    """
    engine = fsdp2.factory(model, config)
    forward = engine._adapter.forward

    def called(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if config.stage == 3 and not torch.is_grad_enabled():
            for module in filter(fsdp2.is_sharded, model.modules()):
                module.unshard()  # type: ignore[operator]
        return output

    engine._adapter = replace(engine._adapter, forward=called)
    return engine


class _ClipsByGroup(TorchEngine):
    def step(self) -> None:
        limit = self._clip
        if limit is None:
            super().step()
            return
        groups = [group["params"] for group in self._optimizer.param_groups]
        norms = [float(self._adapter.full_tensor(torch.nn.utils.clip_grad_norm_(group, limit))) for group in groups]
        self._clip = None
        try:
            super().step()
        finally:
            self._clip = limit
        self._last_grad_norm = math.hypot(*norms)


def fsdp2_clips_by_group(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Each parameter group is clipped by its own norm; ``grad_norm`` tells the global one, as it should.

    Wrong with several groups, since clipping by the global norm keeps the gradient's direction, and this does not.
    """
    engine = fsdp2.factory(model, config)
    engine.__class__ = _ClipsByGroup
    return engine
