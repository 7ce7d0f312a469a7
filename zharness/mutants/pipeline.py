"""Define mutants of a pipeline that lose, reorder or wrongly scale micro-batches, losses or gradients.

The mutants wrap torch's pipeline schedules on a mesh with the axis pp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import EngineConfig, torch_pp
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import EngineWrapper
from zharness.parity import Part

MicroBatches = Sequence[tuple[Tensor, Tensor]]
Loss = Callable[[Any, Any], Tensor]


def on_pipeline(
    part: Part | None = Part.REDUCTION,
    model: str = "chain",
    parameter: str = "*",
    law: str = "pipeline.training",
    variant: str = "gpipe",
    cause: str = "",
    world_size: int = 2,
    mesh: str = "pp2",
) -> Target:
    """Return a target on a pipeline, by default of two stages on two ranks.

    With four ranks, each of two stages has two data-parallel replicas (the mesh pp2) or two ranks of tp (pp2.tp2).
    """
    return Target(law, part, model, variant, parameter=parameter, cause=cause, world_size=world_size, mesh=mesh)


class PipelineWrapper(EngineWrapper):
    """The base class of mutants of a pipeline.

    ``capabilities`` is an attribute of the class, because a run without a mesh cannot build the mutant.
    """

    wraps = "torch_pp"
    capabilities = torch_pp.CAPABILITIES

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        """Run the batch on the correct engine; subclasses break this method."""
        losses: Sequence[Tensor] = self.base.train_batch(micro_batches, loss)
        return losses


@mutant(FaultKind.CONTRIBUTION, on_pipeline(Part.ACCUMULATION, parameter="blocks.3.*"), origin=Origin.MESH)
class DropsAMicroBatchOfTheLastStage(PipelineWrapper):
    """Loses the last block's gradient of the first micro-batch that the last stage runs."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.seen: set[nn.Parameter] = set()
        for parameter in self.module.get_submodule("blocks.3").parameters():
            parameter.register_hook(lambda grad, parameter=parameter: self.changed(parameter, grad))  # type: ignore[no-untyped-call]

    def changed(self, parameter: nn.Parameter, grad: Tensor) -> Tensor:
        """Return zeros for the first gradient of a parameter, and later gradients unchanged."""
        if parameter in self.seen:
            return grad
        self.seen.add(parameter)
        return torch.zeros_like(grad)


@mutant(
    FaultKind.SCALE,
    on_pipeline(),
    origin=Origin.MESH,
    imitates="https://github.com/pytorch/torchtitan/issues/1732",
)
class DividesByMicroBatchesTwice(PipelineWrapper):
    """Divides the gradients by the number of micro-batches twice."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        losses = super().train_batch(micro_batches, loss)
        for parameter in self.parameters_with_grad():
            parameter.grad = None if parameter.grad is None else parameter.grad / len(micro_batches)
        return losses


@mutant(FaultKind.SCALE, on_pipeline(parameter="blocks.0.*", variant="1f1b"), origin=Origin.MESH)
class FirstStageDoesNotDivide(PipelineWrapper):
    """Sums gradients over micro-batches in the first rank's stage; the other stages average them."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        losses = super().train_batch(micro_batches, loss)
        if dist.get_rank() == 0:
            for parameter in self.parameters_with_grad():
                parameter.grad = None if parameter.grad is None else parameter.grad * len(micro_batches)
        return losses


@mutant(FaultKind.RANKS, on_pipeline(Part.FORWARD, parameter="loss*"), origin=Origin.MESH)
class ReversesInputs(PipelineWrapper):
    """Runs the inputs of the micro-batches in reverse order, but keeps the order of their targets."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        inputs = [inputs for inputs, _ in micro_batches][::-1]
        targets = [target for _, target in micro_batches]
        return super().train_batch(list(zip(inputs, targets, strict=True)), loss)


@mutant(FaultKind.RANKS, on_pipeline(Part.FORWARD, parameter="loss*", variant="zbv"), origin=Origin.MESH)
class ReversesLosses(PipelineWrapper):
    """Returns the losses in the reverse order of the micro-batches."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        return super().train_batch(micro_batches, loss)[::-1]


@mutant(FaultKind.CONTRIBUTION, on_pipeline(model="skips"), origin=Origin.MESH)
class LosesTheGradientOfASecondOutput(PipelineWrapper):
    """Loses the gradient of the second output of the first stage, which is a skip connection."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.module.get_submodule("blocks.1").register_forward_hook(self.without_second)

    def without_second(self, module: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the outputs with the same values, but pass no gradient back through the second output."""
        first, second = output
        return first, second.detach() + 0 * first


@mutant(FaultKind.OPTIMIZER, on_pipeline(Part.OPTIMIZER, parameter="blocks.0.*"), origin=Origin.MESH)
class StepsTheLastStageAlone(PipelineWrapper):
    """Makes no optimizer step in the first rank's stage."""

    def step(self) -> None:
        if dist.get_rank() > 0:
            self.base.step()


@mutant(
    FaultKind.CONTRIBUTION,
    on_pipeline(law="pipeline.windows", variant="stepped"),
    origin=Origin.MESH,
)
class KeepsGradientsOverSteps(PipelineWrapper):
    """Drops no gradient in ``zero_grad``, so that the next batch adds to the gradients of the previous batch."""

    def zero_grad(self) -> None:
        """Drop nothing."""


@mutant(
    FaultKind.STALE,
    on_pipeline(Part.FORWARD, parameter="loss*", law="pipeline.windows", variant="stepped"),
    origin=Origin.MESH,
)
class KeepsTheFirstLoss(PipelineWrapper):
    """Runs each batch with the loss function of the first batch that had the same number of micro-batches."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.losses: dict[int, Loss] = {}

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        return super().train_batch(micro_batches, self.losses.setdefault(len(micro_batches), loss))


@mutant(FaultKind.RANKS, on_pipeline(None, cause="returned 3 losses for 4 micro-batches"), origin=Origin.MESH)
class LosesALoss(PipelineWrapper):
    """Does not return the loss of the last micro-batch."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        return super().train_batch(micro_batches, loss)[:-1]


@mutant(FaultKind.SCALE, on_pipeline(world_size=4), origin=Origin.MESH)
class SumsOverDataParallelism(PipelineWrapper):
    """Sums gradients over the data-parallel ranks of a stage instead of averaging them."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        losses = super().train_batch(micro_batches, loss)
        stages = self.config.mesh.size("pp")
        for parameter in self.parameters_with_grad():
            parameter.grad = None if parameter.grad is None else parameter.grad * (dist.get_world_size() // stages)
        return losses


@mutant(FaultKind.RANKS, on_pipeline(Part.FORWARD, parameter="loss*", world_size=4), origin=Origin.MESH)
class TrainsOneReplicasBatch(PipelineWrapper):
    """Trains both replicas of a stage on the micro-batches of the first replica."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, list(micro_batches))
        return super().train_batch(everywhere[0], loss)


@mutant(FaultKind.RANKS, on_pipeline(Part.FORWARD, parameter="loss*", variant="1f1b", world_size=4), origin=Origin.MESH)
class ReturnsLossesOfTheOtherReplica(PipelineWrapper):
    """Returns to each replica the losses of the other replica."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, list(super().train_batch(micro_batches, loss)))
        losses: Sequence[Tensor] = everywhere[dist.get_rank() ^ 1]
        return losses
