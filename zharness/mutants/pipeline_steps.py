"""Define mutants of a pipeline in which the stages or replicas do not make the same step."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.mutants import seams_engines
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.pipeline import Loss, MicroBatches, PipelineWrapper, on_pipeline
from zharness.parity import Part

LAST_OF_FOUR = 3  # a rank of the last stage


def on_rate(parameter: str, part: Part = Part.OPTIMIZER, variant: str = "", world_size: int = 2) -> Target:
    """Return a target of the law pipeline.learning_rate."""
    return on_pipeline(part, parameter=parameter, law="pipeline.learning_rate", variant=variant, world_size=world_size)


def on_later_steps(parameter: str, part: Part = Part.OPTIMIZER) -> Target:
    """Return a target of the law pipeline.learning_rate on four ranks, with one micro-batch per step."""
    return on_rate(parameter, part, "single", world_size=4)


class KnowsTheFirstRate(PipelineWrapper):
    """The base class of mutants that use the learning rate of the first step again."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.first_rate = self.optimizer.param_groups[0]["lr"]

    def restore_rate(self) -> None:
        """Set the learning rate of the first step on every rank except rank 0."""
        for group in self.optimizer.param_groups if dist.get_rank() else ():
            group["lr"] = self.first_rate


@mutant(FaultKind.OPTIMIZER, on_rate("learning rate*"), origin=Origin.MESH)
class ScheduleOfTheFirstStageAlone(KnowsTheFirstRate):
    """Advances the learning-rate schedule in the first rank's stage alone; the other stages keep their first rate."""

    def step(self) -> None:
        self.base.step()
        self.restore_rate()


@mutant(FaultKind.OPTIMIZER, on_rate("blocks.2.*"), origin=Origin.MESH)
class StepsLaterStagesByTheFirstRate(KnowsTheFirstRate):
    """Steps all stages except the first rank's with the first learning rate, but reports the schedule's rate."""

    def step(self) -> None:
        self.restore_rate()
        self.base.step()


@mutant(FaultKind.OPTIMIZER, on_later_steps("blocks.2.*", Part.GATHER), origin=Origin.MESH)
class StepsOneReplicaAStepLate(KnowsTheFirstRate):
    """Steps one of the last stage's two ranks with the learning rate of the previous step."""

    def step(self) -> None:
        (group,) = self.optimizer.param_groups
        if dist.get_rank() == LAST_OF_FOUR:
            group["lr"], self.first_rate = self.first_rate, group["lr"]
        self.base.step()


@mutant(FaultKind.RANKS, on_later_steps("blocks.3.linear.bias", Part.REDUCTION), origin=Origin.MESH)
class AveragesAWeightInTheFirstStepAlone(PipelineWrapper):
    """From the second step on, does not average the gradient of the last stage's smallest weight over ranks."""

    name = "blocks.3.linear.bias"

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.steps = 0
        self.own: Tensor | None = None
        self.module.get_parameter(self.name).register_hook(self.keep)  # type: ignore[no-untyped-call]

    def keep(self, grad: Tensor) -> None:
        """Keep this rank's gradient, before it is averaged."""
        self.own = grad.clone()

    def step(self) -> None:
        self.base.step()
        self.steps += 1

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        losses = super().train_batch(micro_batches, loss)
        if self.steps and self.own is not None:
            self.module.get_parameter(self.name).grad = self.own
        return losses


def on_not_finite(variant: str, parameter: str, part: Part = Part.OPTIMIZER) -> Target:
    """Return a target of the law pipeline.not_finite."""
    return on_pipeline(part, parameter=parameter, law="pipeline.not_finite", variant=variant)


class KnowsOwnGradients(PipelineWrapper):
    """The base class of mutants that decide by the gradients of this rank's stages."""

    def own_is_finite(self) -> bool:
        """Return whether all gradients of this rank's stages are finite."""
        params = seams_engines.stage_params(self.base).values()
        return all(bool(param.grad.isfinite().all()) for param in params if param.grad is not None)


@mutant(FaultKind.RANKS, on_not_finite("last", "blocks.2.*"), origin=Origin.MESH)
class StageSkipsItsOwnOverflow(KnowsOwnGradients):
    """Skips a step only on ranks whose own stages have a gradient that is not finite; the other ranks make the step."""

    def step(self) -> None:
        if self.own_is_finite():
            self.base.step()


@mutant(FaultKind.RANKS, on_not_finite("first", "outcome"), origin=Origin.MESH)
class StageRaisesAtItsOwnOverflow(KnowsOwnGradients):
    """Raises only on ranks whose own stages have a gradient that is not finite; the other ranks make the step."""

    def step(self) -> None:
        if not self.own_is_finite():
            raise FloatingPointError("a gradient is not finite")
        self.base.step()


@mutant(
    FaultKind.CONTRIBUTION,
    on_not_finite("first", "finiteness of blocks.1.linear.weight", Part.ACCUMULATION),
    origin=Origin.MESH,
)
class ZeroesWhatIsNotFinite(PipelineWrapper):
    """Replaces infinite or NaN elements of gradients by zeros after each batch."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        losses = super().train_batch(micro_batches, loss)
        for parameter in self.parameters_with_grad():
            parameter.grad = None if parameter.grad is None else parameter.grad.nan_to_num(0.0, 0.0, 0.0)
        return losses
