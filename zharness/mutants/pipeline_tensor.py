"""Define mutants of a pipeline that are wrong only with a second mesh axis or with more than two stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.engines.torch_access import local_tensor
from zharness.mesh import PIPELINE
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.pipeline import Loss, MicroBatches, PipelineWrapper
from zharness.mutants.pipeline_settings import ClipsByItself
from zharness.parity import Part


def on_four_ranks(law: str, part: Part, parameter: str, mesh: str, variant: str = "gpipe") -> Target:
    """Return a target on four ranks of ``mesh``."""
    return Target(law, part, "chain", variant, parameter=parameter, world_size=4, mesh=mesh)


def find_stage(config: EngineConfig) -> int:
    """Return the coordinate of this rank on pp."""
    return config.mesh.coordinates(dist.get_rank(), dist.get_world_size())[PIPELINE]


@mutant(
    FaultKind.CONTRIBUTION,
    on_four_ranks("pipeline.training", Part.FORWARD, "loss*", "pp2.tp2"),
    origin=Origin.MESH,
)
class LastStageDoesNotReduceOverTensorRanks(PipelineWrapper):
    """Does not sum the partial outputs of a layer in the last stage over the ranks of tp."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        if find_stage(config) == config.mesh.size(PIPELINE) - 1:
            self.module.get_submodule("blocks.2.linear").register_forward_hook(self.keep_own_part)

    def keep_own_part(self, module: Any, inputs: Sequence[Tensor], output: Tensor) -> Tensor:
        """Return the part of the output that this rank has computed, with the bias."""
        return nn.functional.linear(*map(local_tensor, (inputs[0], module.weight, module.bias)))


@mutant(
    FaultKind.CLIPPING,
    on_four_ranks("pipeline.norm", Part.REDUCTION, "norm", "pp2.tp2", "1f1b"),
    origin=Origin.MESH,
)
class CountsTensorReplicasOfStages(ClipsByItself):
    """Counts a weight that tp does not split once for each rank of tp in the global norm."""

    def measure(self, grads: Sequence[Tensor]) -> float:
        return super().measure([local_tensor(grad) for grad in grads])

    def find_factor(self, limit: float) -> float:
        return min(1.0, limit / (self.norm + 1e-6))


@mutant(
    FaultKind.STALE,
    on_four_ranks("pipeline.training", Part.FORWARD, "loss*", "pp4"),
    origin=Origin.MESH,
)
class MiddleStageSendsTheOutputBefore(PipelineWrapper):
    """Sends the output of the previous micro-batch from a middle stage, which needs more than two stages."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.before: Tensor | None = None
        if find_stage(config) == 1 and config.mesh.size(PIPELINE) > 2:
            self.module.get_submodule("blocks.1").register_forward_hook(self.delay)

    def delay(self, module: Any, inputs: Any, output: Tensor) -> Tensor:
        """Return the values of the previous output, with the gradient of the current output."""
        if not output.requires_grad:  # a forward to learn shapes
            return output
        before, self.before = self.before, output.detach()
        return output if before is None else output + (before - output).detach()


@mutant(
    FaultKind.SCALE,
    on_four_ranks("pipeline.one_hot", Part.REDUCTION, "blocks.*", "pp2", ""),
    origin=Origin.MESH,
)
class AveragesOverReplicasWithALoss(PipelineWrapper):
    """Averages the gradients of a stage over the replicas whose loss is not 0, instead of over all replicas."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        losses = super().train_batch(micro_batches, loss)
        replicas = torch.tensor(float(any(bool(value) for value in losses)))
        dist.all_reduce(replicas)
        factor = dist.get_world_size() / max(1.0, float(replicas))
        for parameter in self.parameters_with_grad():
            parameter.grad = None if parameter.grad is None else parameter.grad * factor
        return losses
