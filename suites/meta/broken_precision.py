"""Engines broken on purpose in what they compute, send, keep and update in which dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from suites.meta.broken import Around, Factory
from zharness.engines import EngineConfig


def without(config: EngineConfig, section: str) -> EngineConfig:
    return replace(config, options={key: value for key, value in config.options.items() if key != section})


class AutocastForgotten(Around):
    """Takes a torch_autocast section, and computes in fp32."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, without(config, "torch_autocast"))


class BackwardLeavesAutocast(Around):
    """Its backward restores the forward's autocast only where that was on (the first version of #7916)."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        with torch.autocast("cpu", enabled=False):
            self.right.backward(loss, retain_graph=retain_graph)


class OuterAutocastWins(Around):
    """Where torch.autocast is on around its call, the section is not looked at."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs) if torch.is_autocast_enabled("cpu") else self.right(*args, **kwargs)


class EveryGradientTravelsLow(Around):
    """Under torch_autocast sends every gradient in bf16, whatever module it belongs to."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, replace(config, options={**config.options, "communication_data_type": "bf16"}))


class ScaledNorm(Around):
    """Reports the norm times a loss scale that bf16 does not have (#7534)."""

    def grad_norm(self) -> float | None:
        norm = self.right.grad_norm()
        return None if norm is None else 65536 * norm


class LateScaler(Around):
    """Doubles its loss scale one step late, and lets the first overflow pass without halving it."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, replace(config, options=self.delayed(config.options)))

    def delayed(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        if "fp16" not in options:
            return options
        late = {"loss_scale_window": options["fp16"]["loss_scale_window"] + 1, "hysteresis": 2}
        return {**options, "fp16": {**options["fp16"], **late}}


class ScaleForgotten(Around):
    """Steps over an infinite gradient as if it were none."""

    def step(self) -> None:
        for grad in self.right.engine._gradients.reduced().values():  # type: ignore[attr-defined]
            grad.nan_to_num_(0.0, 0.0, 0.0)
        self.right.step()


class OneWireForAll(Around):
    """Every engine of a process sends in the dtype that the first one was given (DeepSpeed #7946)."""

    first: Mapping[str, Any] | None = None

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        if OneWireForAll.first is None:
            OneWireForAll.first = config.options
        super().__init__(model, replace(config, options=OneWireForAll.first))


class MastersForgotten(Around):
    """Makes its masters anew from the rounded weights after every step."""

    def step(self) -> None:
        self.right.step()
        for master in self.right.engine._parameters.masters.values():  # type: ignore[attr-defined]
            master.copy_(master.bfloat16())


class BuffersLowered(Around):
    """Converts the model's buffers with its parameters."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    module._buffers[name] = buffer.bfloat16()
        super().__init__(model, config)


autocast_forgotten: Factory = AutocastForgotten
backward_leaves_autocast: Factory = BackwardLeavesAutocast
outer_autocast_wins: Factory = OuterAutocastWins
every_gradient_travels_low: Factory = EveryGradientTravelsLow
scaled_norm: Factory = ScaledNorm
late_scaler: Factory = LateScaler
scale_forgotten: Factory = ScaleForgotten
one_wire_for_all: Factory = OneWireForAll
masters_forgotten: Factory = MastersForgotten
buffers_lowered: Factory = BuffersLowered
