"""Define mutants that break the loop of an engine that runs whole trainings: its samples, losses and clipping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.engines.protocol import IGNORED, TrainedStep
from zharness.mutants.gradient_norm import compute_norm
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import EngineWrapper
from zharness.parity import Part

Samples = Sequence[tuple[Tensor, Tensor]]
Loss = Callable[..., Tensor]


def on_loop(
    law: str, variant: str, part: Part | None = Part.REDUCTION, parameter: str = "*", cause: str = ""
) -> Target:
    """Return a target on a loop of two ranks."""
    return Target(law, part, "chain", variant, parameter=parameter, cause=cause)


class TrainerWrapper(EngineWrapper):
    """The base class of mutants that break a training loop."""

    wraps = "trainer_ddp"

    def train(self, samples: Samples, loss: Loss, counts_items: bool) -> Sequence[TrainedStep]:
        """Run the training on the correct engine; subclasses override this method to break the training."""
        steps: Sequence[TrainedStep] = self.base.train(samples, loss, counts_items)
        return steps


@mutant(
    FaultKind.SCALE,
    on_loop("loop.items", "accumulated_items", Part.FORWARD, "loss"),
    origin=Origin.MESH,
    imitates="https://github.com/huggingface/transformers/pull/34191",
)
class AveragesMicroBatchesOfItems(TrainerWrapper):
    """Divides each micro-batch's loss by that micro-batch's own number of items, and averages these quotients."""

    def train(self, samples: Samples, loss: Loss, counts_items: bool) -> Sequence[TrainedStep]:
        terms = self.config.accumulation_steps * dist.get_world_size()

        def of_own_items(output: Any, target: Tensor, items: Tensor) -> Tensor:
            return loss(output, target, (target != IGNORED).sum()) / terms

        return super().train(samples, of_own_items if counts_items else loss, counts_items)


@mutant(
    FaultKind.SCALE,
    on_loop("loop.items", "items", Part.FORWARD, "loss"),
    origin=Origin.MESH,
    imitates="https://github.com/huggingface/transformers/pull/34373",
)
class CountsItemsOfOneRank(TrainerWrapper):
    """Divides the loss of each rank by the number of that rank's own items."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, replace(config, options={**config.options, "average_tokens_across_devices": False}))


@mutant(
    FaultKind.CONTRIBUTION, on_loop("loop.training", "remainder", None, cause="made 1 steps of 2"), origin=Origin.MESH
)
class DropsTheRemainder(TrainerWrapper):
    """Leaves out the samples that do not fill a window."""

    def train(self, samples: Samples, loss: Loss, counts_items: bool) -> Sequence[TrainedStep]:
        window = self.config.accumulation_steps * self.config.micro_batch_size * dist.get_world_size()
        return super().train(samples[: len(samples) // window * window], loss, counts_items)


@mutant(FaultKind.SCALE, on_loop("loop.training", "remainder"), origin=Origin.MESH)
class DividesTheRemainderByTheWindow(TrainerWrapper):
    """Divides the gradient of an incomplete last window by the number of micro-batches of a full window."""

    def train(self, samples: Samples, loss: Loss, counts_items: bool) -> Sequence[TrainedStep]:
        *steps, last = super().train(samples, loss, counts_items)
        return [*steps, replace(last, grads={name: grad / 2 for name, grad in last.grads.items()})]


@mutant(FaultKind.RANKS, on_loop("loop.training", "single", Part.FORWARD, "loss"), origin=Origin.MESH)
class GivesAllRanksOneBatch(TrainerWrapper):
    """Trains every rank on the samples of the first rank."""

    def train(self, samples: Samples, loss: Loss, counts_items: bool) -> Sequence[TrainedStep]:
        size, ranks = self.config.micro_batch_size, dist.get_world_size()
        firsts = [samples[start : start + size] for start in range(0, len(samples), size * ranks)]
        return super().train([sample for first in firsts for _ in range(ranks) for sample in first], loss, counts_items)


@mutant(FaultKind.CLIPPING, on_loop("loop.clipping", "clipped", parameter="norm"), origin=Origin.MESH)
class ReportsTheClippedNorm(TrainerWrapper):
    """Reports the norm of the clipped gradients as the norm of a step."""

    def train(self, samples: Samples, loss: Loss, counts_items: bool) -> Sequence[TrainedStep]:
        steps = super().train(samples, loss, counts_items)
        return [replace(step, norm=compute_norm(step.grads)) for step in steps]


@mutant(FaultKind.CLIPPING, on_loop("loop.clipping", "clipped", parameter="blocks*"), origin=Origin.MESH)
class ClipsToTwiceTheLimit(TrainerWrapper):
    """Clips gradients to twice the limit."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, replace(config, clip=None if config.clip is None else 2 * config.clip))


@mutant(FaultKind.OPTIMIZER, on_loop("loop.training", "accumulated", Part.OPTIMIZER, "*.bias"), origin=Origin.MESH)
class LosesTheLastStep(TrainerWrapper):
    """Reports the weights from before the last step as the weights after the last step."""

    def train(self, samples: Samples, loss: Loss, counts_items: bool) -> Sequence[TrainedStep]:
        *steps, last = super().train(samples, loss, counts_items)
        return [*steps, replace(last, params=steps[-1].params)]


class AccelerateDeepSpeedWrapper(TrainerWrapper):
    """The base class of mutants around accelerate with DeepSpeed."""

    wraps = "accelerate_deepspeed"
    stages = (1,)


class TrainerDeepSpeedWrapper(TrainerWrapper):
    """The base class of mutants around transformers.Trainer with DeepSpeed."""

    wraps = "trainer_deepspeed"
    stages = (1,)


@mutant(
    FaultKind.CONTRIBUTION,
    on_loop("loop.training", "accumulated", None, cause="made 4 steps of 2"),
    origin=Origin.MESH,
)
class StepsAtEachMicroBatchOfAccelerate(AccelerateDeepSpeedWrapper):
    """Configures DeepSpeed with windows of one micro-batch, so that DeepSpeed makes a step at each micro-batch."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, replace(config, accumulation_steps=1))


@mutant(FaultKind.STALE, on_loop("loop.training", "accumulated", Part.LOCAL_GRADIENT), origin=Origin.MESH)
class RecordsTheFirstGradientsOfAccelerate(AccelerateDeepSpeedWrapper):
    """Records the gradients of the first step for every step."""

    def train(self, samples: Samples, loss: Loss, counts_items: bool) -> Sequence[TrainedStep]:
        steps = super().train(samples, loss, counts_items)
        return [replace(step, grads=steps[0].grads) for step in steps]


@mutant(FaultKind.STALE, on_loop("loop.training", "accumulated", Part.OPTIMIZER), origin=Origin.MESH)
class ReadsWeightsBeforeTheStepOfDeepSpeed(TrainerDeepSpeedWrapper):
    """Records the weights from before a step as the weights after the step."""

    def train(self, samples: Samples, loss: Loss, counts_items: bool) -> Sequence[TrainedStep]:
        before = self.base.full_params()
        steps = super().train(samples, loss, counts_items)
        olds = [before, *(step.params for step in steps)]
        return [replace(step, params=old) for step, old in zip(steps, olds, strict=False)]
