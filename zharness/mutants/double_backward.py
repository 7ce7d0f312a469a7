"""Mutants that compute wrong second derivatives."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines import (
    AccumulationOwner,
    EngineConfig,
)
from zharness.engines.reference import ReferenceEngine
from zharness.mutants import seams, seams_stage3
from zharness.mutants.mutant import (
    FaultKind,
    Origin,
    Target,
    mutant,
    mutant_factory,
)
from zharness.mutants.wrapper import EngineWrapper
from zharness.parity import Part


class Once(torch.autograd.Function):
    """An autograd Function that returns a copy of its input and detaches the gradient in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].detach()


@mutant(
    FaultKind.GRAPH,
    Target("double_backward.gradient_penalty", Part.LOCAL_GRADIENT, model="blocks"),
    origin=Origin.GRAPHS,
)
class FirstOrderOnly(EngineWrapper):
    """Computes right gradients, but detaches them, so that they cannot be differentiated again."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Once.apply(self.base(*args, **kwargs))  # type: ignore[no-untyped-call]


@mutant_factory(
    FaultKind.GRAPH,
    Target("double_backward.weight_penalty", model="blocks", variant="reduced"),
    wraps="reference",
    stages=(3,),
    origin=Origin.BLIND_2,
)
def second_order_undivided(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 3, does not divide by the world size in the backward of the gradient reduction.

    If parameter gradients are differentiated again (``create_graph=True``), the second-order part is too large by a
    factor of the world size.
    """
    engine = seams.build(model, config)
    if config.stage == 3:
        seams_stage3.wrap_all_gather_grad(engine, lambda _: partial(seams_stage3.all_gather_undivided, engine))
    return engine


@mutant_factory(
    FaultKind.GRAPH,
    Target("double_backward.weight_penalty", model="blocks", variant="reduced"),
    wraps="reference",
    stages=(3,),
    origin=Origin.BLIND_3,
)
def double_backward_undivided(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 3, all-gathers gradients in the backward of the reduction, but does not divide them for the mean.

    A loss that depends on the parameters' gradients (``create_graph=True``) contributes gradients that are too large by
    a factor of the world size.
    """
    engine = seams.build(model, config)

    def wrap(all_gather: seams_stage3.GradCollective) -> seams_stage3.GradCollective:
        return lambda param, shard: all_gather(param, shard) * seams_stage3.shard_divisor(engine, param)

    seams_stage3.wrap_all_gather_grad(engine, wrap)
    return engine


@mutant_factory(
    FaultKind.GRAPH,
    Target("double_backward.weight_penalty", model="blocks", variant="reduced"),
    wraps="reference",
    stages=(3,),
    origin=Origin.BLIND_4,
)
def undivided_second_order(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 3, all-gathers gradients in the backward of the mean over ranks, without the mean's division.

    With ``create_graph=True``, a penalty on the weights' gradients gets a second-order term that is too large by a
    factor of the world size.
    """
    engine = seams.build(model, config)
    seams_stage3.wrap_all_gather_grad(engine, lambda _: partial(seams_stage3.all_gather_undivided, engine))
    return engine


@mutant_factory(
    FaultKind.GRAPH,
    Target("double_backward.weight_penalty", model="blocks", variant="reduced", parameter="factor"),
    wraps="reference",
    stages=(3,),
    origin=Origin.BLIND_5,
)
def penalty_undivided(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 3, all-gathers the gradient in the backward of the mean over ranks, without dividing it.

    The gradient of a gradient penalty on the parameters is too large by a factor of the world size.
    """
    engine = seams.build(model, config)

    def wrap(all_gather: seams_stage3.GradCollective) -> seams_stage3.GradCollective:
        def all_gather_undivided(param: seams.ModelParam, shard: Tensor) -> Tensor:
            return all_gather(param, shard) * (seams_stage3.shard_divisor(engine, param) * param.predivide_factor)

        return all_gather_undivided

    seams_stage3.wrap_all_gather_grad(engine, wrap)
    return engine


@mutant_factory(
    FaultKind.GRAPH,
    Target("double_backward.weight_penalty", model="blocks", variant="reduced", parameter="factor"),
    wraps="reference",
    stages=(3,),
    origin=Origin.BLIND_6,
)
def second_derivative_undivided(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 3, all-gathers gradients in the backward of their reduce-scatter, but does not divide them for the mean.

    A penalty on the weights' gradients (``autograd.grad`` with ``create_graph``) has a gradient too large by a factor
    of the world size.
    """
    engine = seams.build(model, config)

    def wrap(all_gather: seams_stage3.GradCollective) -> seams_stage3.GradCollective:
        return lambda param, shard: all_gather(param, shard) * seams.divisor(engine)

    seams_stage3.wrap_all_gather_grad(engine, wrap)
    return engine


@mutant_factory(
    FaultKind.GRAPH,
    Target("double_backward.weight_penalty", model="blocks", variant="reduced", setting="2_by_engine"),
    wraps="reference",
    stages=(3,),
    origin=Origin.BLIND_11,
)
def second_order_ignores_the_window(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 3, does not divide second derivatives by the number of micro-batches of the engine's window."""
    engine = seams.build(model, config)
    window = config.accumulation_steps if config.accumulation_owner is AccumulationOwner.ENGINE else 1

    def wrap(all_gather: seams_stage3.GradCollective) -> seams_stage3.GradCollective:
        return lambda param, shard: all_gather(param, shard) * window

    seams_stage3.wrap_all_gather_grad(engine, wrap)
    return engine
