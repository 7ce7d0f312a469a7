"""Define mutants of a pipeline that send narrower numbers from stage to stage than the model has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.pipeline import OverPipeline, on_pipeline
from zharness.parity import Part


def on_wire(part: Part, parameter: str, variant: str = "gpipe") -> Target:
    """Return a target on the model whose activations and gradients need all bits of float32."""
    return on_pipeline(part, "random_chain", parameter, variant=variant)


def on_split_wire(law: str = "pipeline.training", variant: str = "gpipe", parameter: str = "blocks.*") -> Target:
    """Return a target on the same model beside tp, which rounds losses in parts, so that gradients alone are judged."""
    return on_pipeline(Part.REDUCTION, "random_chain", parameter, law, variant, world_size=4, mesh="pp2.tp2")


class ChangesAMessage(OverPipeline):
    """The base class of mutants that change what a block at the end of a stage sends."""

    sender = "blocks.1"  # the last block of the first of two stages

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.module.get_submodule(self.sender).register_forward_hook(self.change)

    def change(self, module: Any, inputs: Any, output: Tensor) -> Tensor:
        """Return what the next stage gets."""
        raise NotImplementedError


@mutant(
    FaultKind.REDUCE_DTYPE,
    on_wire(Part.FORWARD, "loss*"),
    on_split_wire(),
    on_split_wire("pipeline.learning_rate", ""),
    origin=Origin.MESH,
)
class SendsActivationsInHalfPrecision(ChangesAMessage):
    """A stage sends its output to the next one in fp16, and gets the gradient in full."""

    def change(self, module: Any, inputs: Any, output: Tensor) -> Tensor:
        return output + (output.half().to(output.dtype) - output).detach()


@mutant(
    FaultKind.REDUCE_DTYPE,
    on_wire(Part.LOCAL_GRADIENT, "blocks.0.*", "1f1b"),
    on_split_wire(variant="1f1b", parameter="blocks.[01].*"),
    on_split_wire("pipeline.any_order", "1f1b", "blocks.[01].*"),
    origin=Origin.MESH,
)
class SendsGradientsOfActivationsInHalfPrecision(ChangesAMessage):
    """A stage gets its input in full, and sends the gradient of it back in bf16."""

    def change(self, module: Any, inputs: Any, output: Tensor) -> Tensor:
        if output.requires_grad:
            output.register_hook(lambda grad: grad.to(torch.bfloat16).to(grad.dtype))  # type: ignore[no-untyped-call]
        return output


@mutant(FaultKind.REDUCE_DTYPE, on_wire(Part.FORWARD, "loss*", "interleaved"), origin=Origin.MESH)
class RoundsTheFirstOfThreeMessages(ChangesAMessage):
    """Of four stages in turn on two ranks, the first one sends in fp16, and only for the second micro-batch."""

    sender = "blocks.0"

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.sent = 0

    def change(self, module: Any, inputs: Any, output: Tensor) -> Tensor:
        self.sent += 1
        return output + (output.half().to(output.dtype) - output).detach() if self.sent == 2 else output
