"""Define mutants of a pipeline whose stages do not make a step alike."""

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
    """Return a target of the law of a learning rate that changes."""
    return on_pipeline(part, parameter=parameter, law="pipeline.learning_rate", variant=variant, world_size=world_size)


def on_later_steps(parameter: str, part: Part = Part.OPTIMIZER) -> Target:
    """Return a target of steps of one micro-batch on four ranks."""
    return on_rate(parameter, part, "single", world_size=4)


class KnowsTheFirstRate(PipelineWrapper):
    """The base class of mutants that use the learning rate of the first step again."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.first_rate = self.optimizer.param_groups[0]["lr"]

    def restore_rate(self) -> None:
        """Set the first rate on every rank but the first."""
        for group in self.optimizer.param_groups if dist.get_rank() else ():
            group["lr"] = self.first_rate


@mutant(FaultKind.OPTIMIZER, on_rate("learning rate*"), origin=Origin.MESH)
class ScheduleOfTheFirstStageAlone(KnowsTheFirstRate):
    """The learning-rate schedule goes on in the first rank's stage alone; the others keep their first rate."""

    def step(self) -> None:
        self.base.step()
        self.restore_rate()


@mutant(FaultKind.OPTIMIZER, on_rate("blocks.2.*"), origin=Origin.MESH)
class StepsLaterStagesByTheFirstRate(KnowsTheFirstRate):
    """All ranks report the rate of the schedule, and stages other than the first rank's step by the first rate."""

    def step(self) -> None:
        self.restore_rate()
        self.base.step()


@mutant(FaultKind.OPTIMIZER, on_later_steps("blocks.2.*", Part.GATHER), origin=Origin.MESH)
class StepsOneReplicaAStepLate(KnowsTheFirstRate):
    """One of two ranks of the last stage makes each step by the rate of the step before."""

    def step(self) -> None:
        (group,) = self.optimizer.param_groups
        if dist.get_rank() == LAST_OF_FOUR:
            group["lr"], self.first_rate = self.first_rate, group["lr"]
        self.base.step()


@mutant(FaultKind.RANKS, on_later_steps("blocks.3.linear.bias", Part.REDUCTION), origin=Origin.MESH)
class AveragesAWeightInTheFirstStepAlone(PipelineWrapper):
    """From the second step on, the smallest weight of the last stage has the gradient of each rank alone."""

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
    """Return a target of the law of a gradient that is not finite in one stage."""
    return on_pipeline(part, parameter=parameter, law="pipeline.not_finite", variant=variant)


class KnowsOwnGradients(PipelineWrapper):
    """The base class of mutants that decide by the gradients of this rank's stages."""

    def own_is_finite(self) -> bool:
        """Return whether all gradients of this rank's stages are finite."""
        params = seams_engines.stage_params(self.base).values()
        return all(bool(param.grad.isfinite().all()) for param in params if param.grad is not None)


@mutant(FaultKind.RANKS, on_not_finite("last", "blocks.2.*"), origin=Origin.MESH)
class StageSkipsItsOwnOverflow(KnowsOwnGradients):
    """The ranks whose stages have a gradient that is not finite leave the step out, and the others make it."""

    def step(self) -> None:
        if self.own_is_finite():
            self.base.step()


@mutant(FaultKind.RANKS, on_not_finite("first", "outcome"), origin=Origin.MESH)
class StageRaisesAtItsOwnOverflow(KnowsOwnGradients):
    """The ranks whose stages have a gradient that is not finite raise, and the others make the step."""

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
    """A batch leaves zeros where a gradient is infinite or NaN."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        losses = super().train_batch(micro_batches, loss)
        for parameter in self.parameters_with_grad():
            parameter.grad = None if parameter.grad is None else parameter.grad.nan_to_num(0.0, 0.0, 0.0)
        return losses
