"""Define mutants of a pipeline that compute right numbers, but place weights on wrong ranks, or report wrong owners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import EngineConfig, Piece, torch_pp
from zharness.law_kit.owners import OWNERS, explain_number
from zharness.law_kit.stage_owners import IN_MODULE, IN_ORDER, IN_STAGES
from zharness.mesh import DATA_SHARD, PIPELINE
from zharness.mutants import seams_engines
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.pipeline import Loss, MicroBatches, PipelineWrapper, on_pipeline
from zharness.parity import Part

WEIGHT, LAST_WEIGHT = "blocks.0.linear.weight", "blocks.2.linear.weight"
LONE_BIAS = "blocks.1.linear.bias"
TRANSPOSED = f"{explain_number(PIPELINE)}: rank 0 (pp 0, dp_shard 0), rank 2 (pp 1, dp_shard 0)"
SHARDS_ALONG_STAGES = f"{IN_STAGES}: 0, 1"
IS_WHOLE, IS_ONE_SHARD = f"{OWNERS}, 2 along dp_shard instead of 1", f"{OWNERS}, 1 along dp_shard instead of 2"


def on_order(parameter: str, cause: str, world_size: int = 4, mesh: str = "pp2", variant: str = "gpipe") -> Target:
    """Return a target of the law pipeline.replicas, whose ``cause`` names the axis and coordinates of the owners."""
    return on_pipeline(
        Part.GATHER,
        parameter=parameter,
        law="pipeline.replicas",
        variant=variant,
        cause=cause,
        world_size=world_size,
        mesh=mesh,
    )


class OnATransposedMesh(PipelineWrapper):
    """The base class of mutants with a transposed DeviceMesh: neighbouring ranks lie along its first axis.

    Each rank trains the micro-batches of the rank whose place it takes, and then receives the losses of its own
    micro-batches, so that all numbers are right.
    """

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        with seams_engines.reordered_device_mesh(torch_pp, seams_engines.transpose_ranks):
            super().__init__(model, config)
        world_size = dist.get_world_size()
        ranks = torch.arange(world_size).view(tuple(config.mesh.shape(world_size).values()))
        self.ranks: list[int] = seams_engines.transpose_ranks(ranks).flatten().tolist()

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        rank = dist.get_rank()
        losses = super().train_batch(gather_from(self.ranks.index(rank), list(micro_batches)), loss)
        found: Sequence[Tensor] = gather_from(self.ranks[rank], list(losses))
        return found


def gather_from(rank: int, value: Any) -> Any:
    """Return the value of ``rank``. This is a collective; each rank may ask for the value of a different rank."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, value)
    return everywhere[rank]


@mutant(
    FaultKind.SHARDS, on_order(WEIGHT, TRANSPOSED), on_order(WEIGHT, TRANSPOSED, variant="1f1b"), origin=Origin.MESH
)
class TransposesStagesAndReplicas(OnATransposedMesh):
    """Transposes the DeviceMesh, so that replicas of a stage lie along pp, and stages lie along dp_shard."""


@mutant(FaultKind.SHARDS, replace(on_order(WEIGHT, SHARDS_ALONG_STAGES), setting="fully_shard"), origin=Origin.MESH)
class ShardsWeightsAlongStages(OnATransposedMesh):
    """Transposes the DeviceMesh, so that the fully_shard shards of a stage lie along pp, and stages along dp_shard."""


@mutant(FaultKind.SHARDS, on_order(WEIGHT, SHARDS_ALONG_STAGES, mesh="pp2.tp2"), origin=Origin.MESH)
class SplitsLayersAlongStages(OnATransposedMesh):
    """Transposes the DeviceMesh, so that the parts of a split layer lie along pp, and stages lie along tp."""


@mutant(
    FaultKind.SHARDS,
    on_order(WEIGHT, IN_ORDER, world_size=2),
    on_order(WEIGHT, IN_ORDER, world_size=2, variant="zbv"),
    origin=Origin.MESH,
)
class ReversesStagesInTheLayout(PipelineWrapper):
    """Reports a layout in which the ranks of the first and the last coordinate of pp exchange their stages."""

    def layout(self) -> Mapping[str, tuple[Piece, ...]]:
        last = dist.get_world_size() - 1
        return {
            name: tuple(replace(piece, rank=last - piece.rank) for piece in pieces)
            for name, pieces in self.base.layout().items()
        }


@mutant(FaultKind.SHARDS, on_order(LONE_BIAS, IN_MODULE, world_size=2, variant="1f1b"), origin=Origin.MESH)
class PutsABiasOnTheNextStage(PipelineWrapper):
    """Reports that a bias of the first stage is on the next stage's rank, which does not have the layer's weight."""

    def layout(self) -> Mapping[str, tuple[Piece, ...]]:
        original: Mapping[str, tuple[Piece, ...]] = self.base.layout()
        return {**original, LONE_BIAS: tuple(replace(piece, rank=piece.rank + 1) for piece in original[LONE_BIAS])}


class IgnoresShards(PipelineWrapper):
    """The base class of mutants whose ranks have whole stages in DDP, even if the options ask for fully_shard."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        at = config.mesh.coordinates(dist.get_rank(), dist.get_world_size())[PIPELINE]
        options = {torch_pp.DATA_PARALLEL: torch_pp.DDP} if self.keeps_whole(at) else {}
        super().__init__(model, replace(config, options={**config.options, **options}))

    def keeps_whole(self, stage: int) -> bool:
        """Return whether the ranks at the coordinate ``stage`` of pp have whole weights, in DDP."""
        return True


@mutant(
    FaultKind.SHARDS,
    replace(on_order(WEIGHT, IS_WHOLE), setting="fully_shard"),
    replace(on_order(WEIGHT, IS_WHOLE, variant="1f1b"), setting="resharded"),
    origin=Origin.MESH,
)
class KeepsStagesWhole(IgnoresShards):
    """Ignores the option fully_shard: all ranks of a stage have whole weights, in DDP."""


@mutant(FaultKind.SHARDS, replace(on_order(LAST_WEIGHT, IS_WHOLE), setting="fully_shard"), origin=Origin.MESH)
class KeepsTheLastStageWhole(IgnoresShards):
    """Ignores the option fully_shard in the last stage: its ranks have whole weights, in DDP."""

    def keeps_whole(self, stage: int) -> bool:
        return stage > 0


@mutant(
    FaultKind.SHARDS,
    on_order(WEIGHT, IS_ONE_SHARD),
    on_order(WEIGHT, IS_ONE_SHARD, variant="interleaved"),
    origin=Origin.MESH,
)
class NamesOneReplica(PipelineWrapper):
    """Reports a layout that names only one of the replicas that DDP has of a stage."""

    def layout(self) -> Mapping[str, tuple[Piece, ...]]:
        size = dist.get_world_size()
        return {
            name: tuple(piece for piece in pieces if self.config.mesh.coordinates(piece.rank, size)[DATA_SHARD] == 0)
            for name, pieces in self.base.layout().items()
        }


@mutant(FaultKind.SHARDS, on_order(WEIGHT, IS_ONE_SHARD), origin=Origin.MESH)
class NamesHalvesOfReplicas(PipelineWrapper):
    """Reports a layout in which each DDP replica of a stage owns half of every weight, as if replicas were shards."""

    def layout(self) -> Mapping[str, tuple[Piece, ...]]:
        return {name: tuple(map(self.halve, pieces)) for name, pieces in self.base.layout().items()}

    def halve(self, piece: Piece) -> Piece:
        """Return the half of a weight that belongs to the rank of ``piece``."""
        middle = piece.stop // 2
        is_first = self.config.mesh.coordinates(piece.rank, dist.get_world_size())[DATA_SHARD] == 0
        return replace(piece, stop=middle) if is_first else replace(piece, start=middle)
