"""Define mutants of a pipeline that are wrong if some weights are frozen."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.mutants import seams_engines
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.pipeline import PipelineWrapper, on_pipeline
from zharness.parity import Part


def on_frozen(variant: str, parameter: str, part: Part | None = Part.REDUCTION, world_size: int = 2) -> Target:
    """Return a target of the law pipeline.frozen."""
    return on_pipeline(part, parameter=parameter, law="pipeline.frozen", variant=variant, world_size=world_size)


@mutant(FaultKind.PARAMETERS, on_frozen("last", "blocks.0.*"), on_frozen("half_1f1b", "blocks.0.*"), origin=Origin.MESH)
class FrozenLastStageSendsZeros(PipelineWrapper):
    """Sends zeros back as gradients from a last stage whose weights are all frozen."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.module.get_submodule("blocks.1").register_forward_hook(self.send)

    def send(self, module: Any, inputs: Any, output: Tensor) -> Tensor:
        """Return the first stage's output; replace its gradient by zeros if no weight of the last stage is trained."""
        later = [
            *self.module.get_submodule("blocks.2").parameters(),
            *self.module.get_submodule("blocks.3").parameters(),
        ]
        if output.requires_grad and not any(parameter.requires_grad for parameter in later):
            output.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
        return output


@mutant(FaultKind.PARAMETERS, on_frozen("layers", "blocks.2.*", Part.OPTIMIZER), origin=Origin.MESH)
class DecaysFrozenWeightsOfTheLastStage(PipelineWrapper):
    """Gives frozen weights of the last stage gradients of zeros, so that weight decay changes these weights."""

    def step(self) -> None:
        for parameter in seams_engines.stage_params(self.base).values() if dist.get_rank() else ():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        self.base.step()


@mutant(FaultKind.PARAMETERS, on_frozen("first_1f1b", "blocks.1.*"), origin=Origin.MESH)
class FrozenFirstLayerFreezesItsStage(PipelineWrapper):
    """Gives the second block gradients of zeros if the first block of the same stage is frozen."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.module.get_submodule("blocks.1").register_forward_hook(self.send)

    def send(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Return the output; replace its gradient by zeros if the input requires no gradient."""
        if output.requires_grad and not inputs[0].requires_grad:
            output.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
        return output


@mutant(FaultKind.PARAMETERS, on_frozen("last_later", "blocks.2.*", Part.OPTIMIZER), origin=Origin.MESH)
class RemembersWhatTrainedFirst(PipelineWrapper):
    """Still updates last-stage weights that were frozen after the first step, with their last gradients."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.last: dict[nn.Parameter, Tensor] = {}

    def step(self) -> None:
        for parameter in seams_engines.stage_params(self.base).values() if dist.get_rank() else ():
            if parameter.grad is not None:
                self.last[parameter] = parameter.grad.clone()
            parameter.grad = self.last.get(parameter)
        self.base.step()
