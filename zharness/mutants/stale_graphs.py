"""Mutants whose backward uses memory or weights that it must not use."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines import (
    EngineConfig,
)
from zharness.engines.reference import ReferenceEngine
from zharness.mutants import seams, seams_engines, seams_stage3
from zharness.mutants.mutant import (
    ALL_STAGES,
    FaultKind,
    Origin,
    Target,
    deepspeed,
    mutant,
    mutant_factory,
)
from zharness.mutants.wrapper import EngineWrapper
from zharness.parity import Part


@mutant(
    FaultKind.STALE,
    Target("double_backward.step_between_retained_backwards", Part.LOCAL_GRADIENT, model="blocks"),
    origin=Origin.SHARDS,
)
class WritesWeightsUnseen(EngineWrapper):
    """Hides the weight updates of a step from autograd, so a graph that saved the old weights uses the new ones."""

    def step(self) -> None:
        parameters = tuple(self.module.parameters())
        versions = seams_engines.versions(parameters)
        self.base.step()
        seams_engines.set_versions(parameters, versions)


@mutant(
    FaultKind.STALE,
    Target("resources.poisoned_memory", None, cause="a gradient is not finite"),
    origin=Origin.SHARDS,
    imitates=deepspeed(8539),
)
class ReadsFreshMemory(EngineWrapper):
    """Adds uninitialized memory, multiplied by zero, to every gradient."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(loss, retain_graph=retain_graph)
        for parameter in self.parameters_with_grad():
            assert parameter.grad is not None
            parameter.grad = parameter.grad + 0 * torch.empty_like(parameter)


class _StepBehindAutograd(ReferenceEngine):
    """A ReferenceEngine whose ``step`` hides its weight updates from autograd's version counters."""

    def step(self) -> None:
        params = list(seams.model_params(self).values())
        parameters = tuple(param.parameter for param in params)
        versions = seams_engines.versions(parameters)
        super().step()
        seams_engines.set_versions(parameters, versions)
        for param in params:
            seams.record_version(self, param)


@mutant_factory(
    FaultKind.STALE,
    Target("double_backward.step_between_retained_backwards", Part.LOCAL_GRADIENT, model="blocks"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_2,
)
def step_behind_autograds_back(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Updates weights in ``step`` without a change that autograd notices, like an edit of ``param.data``.

    A backward through a graph that is older than the step should raise ("modified by an inplace operation"), but
    succeeds and combines old activations with new weights.
    """
    return seams.build(model, config, _StepBehindAutograd)


@mutant_factory(
    FaultKind.GRAPH,
    Target("double_backward.step_between_retained_backwards", Part.LOCAL_GRADIENT, model="blocks", parameter="refused"),
    wraps="reference",
    stages=(3,),
    origin=Origin.BLIND_3,
)
def stale_graph_accepted(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 3, unshards the new weights in a backward through a graph that is older than the last step.

    Plain PyTorch raises in such a backward ("modified by an inplace operation"); the mutant combines activations of old
    weights with new weights, and its gradients are not the gradients of any function.
    """
    engine = seams.build(model, config)
    seams_stage3.wrap_unshard(engine, partial(_skip_stale_checks, engine))
    return engine


@mutant_factory(
    FaultKind.STALE,
    Target("double_backward.step_between_retained_backwards", Part.LOCAL_GRADIENT, model="blocks", parameter="refused"),
    wraps="reference",
    stages=(3,),
    origin=Origin.BLIND_6,
)
def old_graph_reads_new_weights(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 3, unshards the current weights in backward, even if a step has changed them since the forward.

    Plain PyTorch raises in such a backward ("modified by an inplace operation"); the mutant computes wrong gradients
    without an error.
    """
    engine = seams.build(model, config)
    seams_stage3.wrap_unshard(engine, partial(_skip_stale_checks, engine))
    return engine


def _skip_stale_checks(engine: ReferenceEngine, unshard: seams_stage3.Unshard) -> seams_stage3.Unshard:
    """Wrap ``unshard`` so that no backward checks whether a step has changed the weights since the forward."""

    def unshard_unchecked(value: Any) -> Any:
        full, forward = unshard(value), seams_stage3.running_forward(engine)
        for unsharded in forward.unsharded_params if forward is not None else ():
            seams_stage3.skip_stale_check(unsharded)
        return full

    return unshard_unchecked
