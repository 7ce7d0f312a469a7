"""Mutants that are wrong if some gradients or weights are kept in bf16 and others in fp32."""

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
    """Drops a bf16 gradient that only a window's last micro-batch made, so that it was never summed in fp32."""

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
    """Never updates bf16 weights that were frozen in the first forward."""

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
