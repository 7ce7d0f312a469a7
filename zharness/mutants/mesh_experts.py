"""Define a mutant that breaks the axis ep of experts. It is DeepSpeed's MoE, and needs DeepSpeed to be installed."""

from __future__ import annotations

import torch
from torch import nn

from zharness.engines import EngineConfig
from zharness.mutants.around import Around
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.parity import Part


def on_gate(law: str) -> Target:
    """Return a target on two ranks, which split four experts, for the weight of their gate."""
    return Target(law, Part.REDUCTION, "routed", parameter="moe.gate.weight", mesh="ep2")


@mutant(FaultKind.CONTRIBUTION, on_gate("mesh.training"), on_gate("mesh.one_hot"), origin=Origin.MESH)
class LosesTheGradientOfTheGate(Around):
    """The gate of experts gets no gradient, as if its softmax were detached."""

    over = "deepspeed"
    stages = (0, 1, 2)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for name, parameter in self.module.named_parameters():
            if ".gate." in name:
                parameter.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
