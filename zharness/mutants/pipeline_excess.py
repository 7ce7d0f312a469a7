"""Define mutants of a pipeline that send small or repeated messages besides those that the law's formula allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import Capabilities, EngineConfig, torch_pp
from zharness.mesh import DATA_SHARD, PIPELINE, REPLICATE, TENSOR, Mesh
from zharness.mutants import seams_engines
from zharness.mutants.mutant import FaultKind, Origin, mutant
from zharness.mutants.pipeline import Loss, MicroBatches, PipelineWrapper
from zharness.mutants.pipeline_wire import SendsAlongAxes, on_messages, on_replicas_wire, on_tensor_ranks


@mutant(
    FaultKind.RESOURCES,
    replace(on_replicas_wire("elements of weights along dp_shard"), setting="fully_shard"),
    replace(on_replicas_wire("elements of weights along dp_shard"), setting="fully_shard", variant="first"),
    origin=Origin.MESH,
)
class GathersWeightsForEachMicroBatch(PipelineWrapper):
    """All-gathers a stage's weights once more for each micro-batch, although the stage's ranks kept them."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        losses = super().train_batch(micro_batches, loss)
        shards: dict[str, Any] = dict(seams_engines.stage_params(self.base))
        for shard in shards.values():
            group = shard.device_mesh.get_group(DATA_SHARD)
            local = shard.to_local().detach()
            for _ in micro_batches:
                dist.all_gather([torch.empty_like(local) for _ in range(dist.get_world_size(group))], local, group)
        return losses


class BroadcastsNumbers(SendsAlongAxes):
    """The base class of mutants in which one stage broadcasts a number for each micro-batch in ``dtypes``."""

    axes: ClassVar[tuple[str, ...]] = (PIPELINE,)
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)

    def send(self, micro_batches: MicroBatches) -> None:
        for dtype in self.dtypes:
            dist.broadcast(torch.zeros(len(micro_batches), dtype=dtype), src=self.choose_root(), group=self.group)

    def choose_root(self) -> int:
        """Return the rank that broadcasts."""
        raise NotImplementedError


@mutant(FaultKind.RESOURCES, on_messages("elements of broadcasts along pp"), origin=Origin.MESH)
class BroadcastsNumbersOfTheFirstStage(BroadcastsNumbers):
    """Broadcasts a number for each micro-batch from the first stage, which has no loss, to all other stages."""

    def choose_root(self) -> int:
        return self.ranks[0]


@mutant(FaultKind.RESOURCES, on_messages("broadcasts along pp", "1f1b"), origin=Origin.MESH)
class BroadcastsLossesInTwoDtypes(BroadcastsNumbers):
    """Broadcasts a number for each micro-batch from the last stage to all others, in float32 and again in float64."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.float64)

    def choose_root(self) -> int:
        return self.ranks[-1]


@mutant(FaultKind.RESOURCES, on_tensor_ranks("elements of activations along tp", "first"), origin=Origin.MESH)
class SumsAFewActivationsInTheFirstBatch(SendsAlongAxes):
    """All-reduces 16 more elements over the ranks of tp in the first stage, fewer than a backward all-reduces."""

    axes: ClassVar[tuple[str, ...]] = (TENSOR,)

    def send(self, micro_batches: MicroBatches) -> None:
        if 0 in self.ranks:
            dist.all_reduce(torch.zeros(len(micro_batches[0][0]), 4), group=self.group)


class CopiesStages(SendsAlongAxes):
    """A correct engine on the axes pp and rep: torch's pipelines, whose stages have copies that DDP trains.

    DDP reduces each gradient once over the copies.
    """

    axes: ClassVar[tuple[str, ...]] = (REPLICATE,)
    capabilities = replace(torch_pp.CAPABILITIES, mesh_axes=frozenset({PIPELINE, REPLICATE}))

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        sizes = tuple((axis, size) for axis, size in config.mesh.sizes if axis != REPLICATE)
        PipelineWrapper.__init__(self, model, replace(config, mesh=Mesh(sizes)))  # the ranks of one stage are copies
        self.join_ranks(config.mesh)

    @classmethod
    def claims(cls, base: Capabilities) -> Capabilities:
        return replace(super().claims(base), mesh_axes=cls.capabilities.mesh_axes)

    def send(self, micro_batches: MicroBatches) -> None:
        """Send nothing."""


@mutant(
    FaultKind.RESOURCES,
    replace(on_replicas_wire("elements of gradients along dp_replicate"), mesh="pp2.rep2"),
    origin=Origin.MESH,
)
class ReducesABiasOverCopiesAgain(CopiesStages):
    """All-reduces one more buffer, as large as a bias, over the copies of a stage."""

    def send(self, micro_batches: MicroBatches) -> None:
        dist.all_reduce(torch.zeros(16), group=self.group)
