"""Define mutants of dropout in the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.mesh import PIPELINE
from zharness.mutants.mesh_dropout import DrawAnew, DrawFromASeed
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.pipeline import Loss, MicroBatches, PipelineWrapper, on_pipeline
from zharness.parity import Part
from zharness.workload.exact_heads import Dropout
from zharness.workload.generators import fork_seeded_generators


def on_dropout(
    variant: str,
    parameter: str = "masks of *",
    part: Part = Part.FORWARD,
    world_size: int = 2,
    mesh: str = "pp2",
) -> Target:
    """Return a target of the law pipeline.dropout."""
    return on_pipeline(part, "dropped_chain", parameter, "pipeline.dropout", variant, world_size=world_size, mesh=mesh)


def find_dropout(module: nn.Module, name: str) -> Dropout | None:
    """Return the dropout module ``name`` of a model, or None if the model has no such dropout."""
    return next((found for path, found in module.named_modules() if path == name and isinstance(found, Dropout)), None)


@mutant(FaultKind.RANKS, on_dropout("gpipe", "masks of blocks.3"), origin=Origin.MESH)
class DropsOneMaskInTheLastBlock(PipelineWrapper):
    """Uses one dropout mask for all micro-batches in the last block."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        if (drop := find_dropout(model, "blocks.3.drop")) is not None:
            drop.draw = DrawFromASeed(1)


@mutant(
    FaultKind.GRAPH,
    on_dropout("1f1b_recomputed", "masks of blocks.1"),
    on_dropout("zero_bubble_recomputed", "masks of blocks.1"),
    origin=Origin.MESH,
)
class RecomputesABlockWithANewMask(PipelineWrapper):
    """Draws another dropout mask in the recomputation of the second block than in its forward."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        if (drop := find_dropout(model, "blocks.1.drop")) is not None:
            drop.draw = DrawAnew(1)


class SeedsBatches(PipelineWrapper):
    """The base class of mutants that seed torch's generator for each batch, and ignore the caller's seed."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        with fork_seeded_generators(self.choose_seed()):
            return super().train_batch(micro_batches, loss)

    def choose_seed(self) -> int:
        """Return the seed of a batch; here, the seed is the same on every rank."""
        return 1


@mutant(FaultKind.RANKS, on_dropout("zbv"), on_dropout("interleaved"), origin=Origin.MESH)
class SeedsStagesAlike(SeedsBatches):
    """Seeds every rank with the same seed, so that all stages drop the same elements."""


@mutant(FaultKind.STALE, on_dropout("gpipe"), on_dropout("zbv_recomputed"), origin=Origin.MESH)
class SeedsEachBatchByTheRank(SeedsBatches):
    """Seeds each rank with its number before every batch, so that all batches drop the same elements."""

    def choose_seed(self) -> int:
        return dist.get_rank()


@mutant(FaultKind.RANKS, on_dropout("1f1b", world_size=4), origin=Origin.MESH)
class SeedsReplicasAlike(SeedsBatches):
    """Seeds each rank by its stage, so that replicas of a stage drop the same elements of different samples."""

    def choose_seed(self) -> int:
        return self.config.mesh.coordinates(dist.get_rank(), dist.get_world_size())[PIPELINE]


@mutant(
    FaultKind.RANKS,
    on_dropout("gpipe", world_size=4, mesh="pp2.tp2"),
    on_dropout("interleaved_recomputed", world_size=4, mesh="pp2.tp2"),
    origin=Origin.MESH,
)
class SeedsTensorRanksApart(SeedsBatches):
    """Seeds the ranks of tp differently, so that they drop different elements of activations that tp does not split."""

    batches = 0

    def choose_seed(self) -> int:
        self.batches += 1
        return 4 * self.batches + dist.get_rank()


@mutant(
    FaultKind.GRAPH,
    on_dropout("zero_bubble", "blocks.*", Part.REDUCTION),
    on_dropout("zero_bubble", "blocks.*", Part.REDUCTION, world_size=4, mesh="pp2.tp2"),
    origin=Origin.MESH,
)
class BackwardOfAStageKnowsNoMask(PipelineWrapper):
    """Ignores the dropout mask in the backward of the third block, so that dropped elements pass gradients on."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        if (drop := find_dropout(model, "blocks.2.drop")) is not None:
            drop.register_forward_hook(self.pass_all)

    def pass_all(self, module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Return the output, with the gradient that an output without dropout has."""
        return output.detach() + inputs[0] - inputs[0].detach()
