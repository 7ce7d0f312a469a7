"""Mutants that keep a copy of weights or gradients for too long."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.mutants import seams, seams_stage3
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.tensor_access import ShardedWrapper
from zharness.mutants.wrapper import EngineWrapper
from zharness.parity import Part


@mutant(
    FaultKind.STALE,
    Target("access.write_param", Part.FORWARD, model="similar", variant="evaluated"),
    Target("parameters.edited_and_stepped", Part.FORWARD, model="similar", variant="evaluated"),
    Target("state.resume", Part.FORWARD, variant="adamw"),
    origin=Origin.BLIND_9,
)
class KeepsWeightsOfAnEvaluation(EngineWrapper):
    """Until the next step, reuses weights that a forward in evaluation mode gathered, even after loads or writes."""

    stages = (3,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.kept: dict[str, Tensor] = {}

        def wrap(fetch: seams_stage3.Fetch) -> seams_stage3.Fetch:
            def fetch_or_copy(param: seams.ModelParam, full: Tensor) -> None:
                if not self.module.training and param.name in self.kept:
                    full.copy_(self.kept[param.name])
                    return
                fetch(param, full)
                if not self.module.training:
                    self.kept[param.name] = full.clone()

            return fetch_or_copy

        seams_stage3.wrap_fetch(self.base, wrap)

    def step(self) -> None:
        self.base.step()
        self.kept.clear()


@mutant(
    FaultKind.CONTRIBUTION,
    Target("access.write_grad", model="similar", variant="inside_caller"),
    Target("access.write_grad", model="similar", variant="inside_engine"),
    origin=Origin.BLIND_9,
)
class WrittenGradHidesLaterOnes(ShardedWrapper):
    """If the caller replaces a gradient inside an accumulation window, drops the gradients of all later backwards."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.written: dict[str, Tensor] = {}

    def write_grad(self, name: str, value: Tensor) -> None:
        self.written[name] = value.clone()
        self.access.write_grad(name, value)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(loss, retain_graph=retain_graph)
        for name, value in self.written.items():
            self.access.write_grad(name, value)

    def zero_grad(self) -> None:
        self.written.clear()
        self.base.zero_grad()


@mutant(
    FaultKind.STALE,
    Target("access.write_param", Part.FORWARD, model="similar", variant="evaluated", setting="largest_limits"),
    origin=Origin.BLIND_11,
)
class KeepsPersistentWeights(EngineWrapper):
    """At stage 3 with a persistence threshold above 0, caches gathered weights until a step, even over writes."""

    stages = (3,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.kept: dict[tuple[str, torch.dtype], Tensor] = {}

        def wrap(fetch: seams_stage3.Fetch) -> seams_stage3.Fetch:
            def fetch_or_copy(param: seams.ModelParam, full: Tensor) -> None:
                if (param.name, full.dtype) not in self.kept:
                    fetch(param, full)
                    self.kept[param.name, full.dtype] = full.clone()
                full.copy_(self.kept[param.name, full.dtype])

            return fetch_or_copy

        if config.options.get("zero_optimization", {}).get("stage3_param_persistence_threshold", 0) > 0:
            seams_stage3.wrap_fetch(self.base, wrap)

    def step(self) -> None:
        self.base.step()
        self.kept.clear()
