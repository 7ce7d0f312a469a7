"""Mutants that are wrong where gradients, or weights, are kept in two dtypes: in bf16 with fp32 beside it."""

from __future__ import annotations

import torch
from torch import nn

from zharness.engines import EngineConfig
from zharness.mutants.circumstances import CountsMicroBatches
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import EngineWrapper
from zharness.parity import Part


@mutant(
    FaultKind.CONTRIBUTION,
    Target(
        "window.partly_used_low_precision", Part.OPTIMIZER, model="experts", variant="later_2_by_caller", dtype="bf16"
    ),
    Target("window.partly_used_layer", Part.OPTIMIZER, model="gated", dtype="bf16", parameter="last.gate"),
    origin=Origin.CIRCUMSTANCES,
)
class DropsFreshGradientsInBf16(CountsMicroBatches):
    """Drops a gradient in bf16 that only the last micro-batch of a window made, which was never summed in fp32."""

    def before_step(self) -> None:
        for name, parameter in self.module.named_parameters():
            if parameter.dtype is torch.bfloat16 and self.micro > 1 and self.uses.get(name) == [self.micro - 1]:
                parameter.grad = None


@mutant(
    FaultKind.PARAMETERS,
    Target("idle.frozen_forward", Part.OPTIMIZER, model="experts", dtype="bf16"),
    origin=Origin.CIRCUMSTANCES,
)
class ForgetsWeightsOfAFrozenForward(EngineWrapper):
    """Never updates weights that were frozen in the first forward, if they are in bf16."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.frozen: set[nn.Parameter] | None = None

    def __call__(self, *args: object, **kwargs: object) -> object:
        if self.frozen is None:
            self.frozen = {parameter for parameter in self.module.parameters() if not parameter.requires_grad}
        return self.base(*args, **kwargs)

    def step(self) -> None:
        for parameter in self.frozen or ():
            if parameter.dtype is torch.bfloat16:
                parameter.grad = None
        self.base.step()
