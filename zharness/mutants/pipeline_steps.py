"""Define mutants of a pipeline whose stages do not make a step alike."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from zharness.engines import EngineConfig
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.pipeline import OverPipeline, on_pipeline
from zharness.parity import Part


def on_rate(parameter: str) -> Target:
    """Return a target of the law of a learning rate that changes."""
    return on_pipeline(Part.OPTIMIZER, parameter=parameter, law="pipeline.learning_rate", variant="")


class KnowsTheFirstRate(OverPipeline):
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
        self.right.step()
        self.restore_rate()


@mutant(FaultKind.OPTIMIZER, on_rate("blocks.2.*"), origin=Origin.MESH)
class StepsLaterStagesByTheFirstRate(KnowsTheFirstRate):
    """All ranks report the rate of the schedule, and stages other than the first rank's step by the first rate."""

    def step(self) -> None:
        self.restore_rate()
        self.right.step()
