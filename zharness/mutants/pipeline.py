"""Define mutants that break a pipeline: a micro-batch of a stage, a divide, an order, a gradient between stages.

They are torch's schedules on a mesh with the axis pp.
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
    """Return a target on a pipeline of two stages; with four ranks each stage has two ranks of data parallelism, or tp.

    ``mesh`` says which.
    """
    return Target(law, part, model, variant, parameter=parameter, cause=cause, world_size=world_size, mesh=mesh)


class PipelineWrapper(EngineWrapper):
    """The base class of mutants of a pipeline.

    ``capabilities`` are known without building the mutant, which a run without a mesh could not.
    """

    wraps = "torch_pp"
    capabilities = torch_pp.CAPABILITIES

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        """Run the batch on the right engine; subclasses break it."""
        losses: Sequence[Tensor] = self.base.train_batch(micro_batches, loss)
        return losses


@mutant(FaultKind.CONTRIBUTION, on_pipeline(Part.ACCUMULATION, parameter="blocks.3.*"), origin=Origin.MESH)
class DropsAMicroBatchOfTheLastStage(PipelineWrapper):
    """The last stage does not add the gradient of the first micro-batch that it runs."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.seen: set[nn.Parameter] = set()
        for parameter in self.module.get_submodule("blocks.3").parameters():
            parameter.register_hook(lambda grad, parameter=parameter: self.changed(parameter, grad))  # type: ignore[no-untyped-call]

    def changed(self, parameter: nn.Parameter, grad: Tensor) -> Tensor:
        """Return zeros for the first gradient of a parameter, and later ones as they are."""
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
    """The gradients are divided by the number of micro-batches once more."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        losses = super().train_batch(micro_batches, loss)
        for parameter in self.parameters_with_grad():
            parameter.grad = None if parameter.grad is None else parameter.grad / len(micro_batches)
        return losses


@mutant(FaultKind.SCALE, on_pipeline(parameter="blocks.0.*", variant="1f1b"), origin=Origin.MESH)
class FirstStageDoesNotDivide(PipelineWrapper):
    """The first rank's stage has the sum over the micro-batches, the others the mean."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        losses = super().train_batch(micro_batches, loss)
        if dist.get_rank() == 0:
            for parameter in self.parameters_with_grad():
                parameter.grad = None if parameter.grad is None else parameter.grad * len(micro_batches)
        return losses


@mutant(FaultKind.RANKS, on_pipeline(Part.FORWARD, parameter="loss*"), origin=Origin.MESH)
class ReversesInputs(PipelineWrapper):
    """The micro-batches' inputs are run in the reverse order of their targets."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        inputs = [inputs for inputs, _ in micro_batches][::-1]
        targets = [target for _, target in micro_batches]
        return super().train_batch(list(zip(inputs, targets, strict=True)), loss)


@mutant(FaultKind.RANKS, on_pipeline(Part.FORWARD, parameter="loss*", variant="zbv"), origin=Origin.MESH)
class ReversesLosses(PipelineWrapper):
    """The losses come in the reverse order of the micro-batches."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        return super().train_batch(micro_batches, loss)[::-1]


@mutant(FaultKind.CONTRIBUTION, on_pipeline(model="skips"), origin=Origin.MESH)
class LosesTheGradientOfASecondOutput(PipelineWrapper):
    """The stage before the last block gets no gradient of its second output, which is a skip connection."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.module.get_submodule("blocks.1").register_forward_hook(self.without_second)

    def without_second(self, module: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the outputs, of which the second has a gradient of zero."""
        first, second = output
        return first, second.detach() + 0 * first


@mutant(FaultKind.OPTIMIZER, on_pipeline(Part.OPTIMIZER, parameter="blocks.0.*"), origin=Origin.MESH)
class StepsTheLastStageAlone(PipelineWrapper):
    """The optimizer of the first rank's stage makes no step."""

    def step(self) -> None:
        if dist.get_rank() > 0:
            self.base.step()


@mutant(
    FaultKind.CONTRIBUTION,
    on_pipeline(law="pipeline.windows", variant="stepped"),
    origin=Origin.MESH,
)
class KeepsGradientsOverSteps(PipelineWrapper):
    """zero_grad drops nothing, so that the next batch adds to the gradients of the last one."""

    def zero_grad(self) -> None:
        """Drop nothing."""


@mutant(
    FaultKind.STALE,
    on_pipeline(Part.FORWARD, parameter="loss*", law="pipeline.windows", variant="stepped"),
    origin=Origin.MESH,
)
class KeepsTheFirstLoss(PipelineWrapper):
    """A batch runs with the loss of the first one of its length, with which the schedule was built."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.losses: dict[int, Loss] = {}

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        return super().train_batch(micro_batches, self.losses.setdefault(len(micro_batches), loss))


@mutant(FaultKind.RANKS, on_pipeline(None, cause="returned 3 losses for 4 micro-batches"), origin=Origin.MESH)
class LosesALoss(PipelineWrapper):
    """The loss of the last micro-batch is not returned."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        return super().train_batch(micro_batches, loss)[:-1]


@mutant(FaultKind.SCALE, on_pipeline(world_size=4), origin=Origin.MESH)
class SumsOverDataParallelism(PipelineWrapper):
    """The ranks of a stage add up their gradients, and do not average them."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        losses = super().train_batch(micro_batches, loss)
        stages = self.config.mesh.size("pp")
        for parameter in self.parameters_with_grad():
            parameter.grad = None if parameter.grad is None else parameter.grad * (dist.get_world_size() // stages)
        return losses


@mutant(FaultKind.RANKS, on_pipeline(Part.FORWARD, parameter="loss*", world_size=4), origin=Origin.MESH)
class TrainsOneReplicasBatch(PipelineWrapper):
    """Both replicas of a stage train the micro-batches of the first one."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, list(micro_batches))
        return super().train_batch(everywhere[0], loss)


@mutant(FaultKind.RANKS, on_pipeline(Part.FORWARD, parameter="loss*", variant="1f1b", world_size=4), origin=Origin.MESH)
class ReturnsLossesOfTheOtherReplica(PipelineWrapper):
    """Each replica gets the losses of the other one."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, list(super().train_batch(micro_batches, loss)))
        losses: Sequence[Tensor] = everywhere[dist.get_rank() ^ 1]
        return losses
