"""Define mutants that break the axis ep of experts. They are DeepSpeed's MoE, and need DeepSpeed to be installed."""

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


def on_routing(parameter: str) -> Target:
    """Return a target on two ranks, whose gate of random weights chooses among four experts."""
    return Target("mesh.routing", Part.REDUCTION, "random_routed", parameter=parameter, mesh="ep2")


class OverGates(Around):
    """The base class of mutants that hook DeepSpeed's gates."""

    over = "deepspeed"
    stages = (0, 1, 2)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for module in self.module.modules():
            if type(module).__name__ == "TopKGate":
                self.hook(module)

    def hook(self, gate: nn.Module) -> None:
        """Register a hook on a gate."""
        raise NotImplementedError


@mutant(FaultKind.CONTRIBUTION, on_routing("*"), origin=Origin.MESH)
class RoutesToTheLeastExpert(OverGates):
    """The gate reads its tokens with the other sign, so that it chooses the expert of the smallest logit."""

    def hook(self, gate: nn.Module) -> None:
        gate.register_forward_pre_hook(lambda _module, inputs: (-inputs[0], *inputs[1:]))


@mutant(FaultKind.SCALE, on_routing("*"), origin=Origin.MESH)
class RoundsTheTokensOfTheGate(OverGates):
    """The gate reads its tokens in bf16."""

    def hook(self, gate: nn.Module) -> None:
        gate.register_forward_pre_hook(lambda _module, inputs: (inputs[0].bfloat16().float(), *inputs[1:]))
