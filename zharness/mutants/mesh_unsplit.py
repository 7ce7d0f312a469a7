"""Define mutants that split over no axis, or over another one, what an axis splits, and compute the right numbers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace

import torch.distributed as dist
from torch import nn

from zharness.engines import EngineConfig, Piece, fsdp2
from zharness.law_kit.owners import OWNERS, explain_number
from zharness.mesh import CONTEXT, DEFAULT_MESH, EXPERT, REPLICATE, TENSOR, Mesh
from zharness.mutants import seams_engines
from zharness.mutants.mesh import REP2, MeshWrapper, on_mesh
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import EngineWrapper
from zharness.parity import Part

ALONG_COPIES = explain_number(REPLICATE)


def on_owners(mesh: str, model: str, cause: str) -> Target:
    """Return a target on two ranks of the law of replicas, which names the axis along which owners are too many."""
    return Target("mesh.replicas", Part.GATHER, model, cause=f"{OWNERS}, {cause}", mesh=mesh)


@mutant(
    FaultKind.SHARDS,
    on_mesh("mesh.replicas", Part.GATHER, mesh=REP2, cause=f"{OWNERS}, 2 along dp_shard instead of 1"),
    origin=Origin.MESH,
)
class CopiesWeightsToAllRanks(MeshWrapper):
    """Every rank has all weights, where the mesh has two copies of them, each in shards."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        copies = Mesh.parse(f"rep{dist.get_world_size()}")
        super().__init__(model, replace(config, mesh=copies) if config.mesh.size(REPLICATE) > 1 else config)


@mutant(FaultKind.SHARDS, on_mesh("mesh.replicas", Part.GATHER, mesh=REP2, cause=ALONG_COPIES), origin=Origin.MESH)
class ShardsAlongTheAxisOfCopies(MeshWrapper):
    """The ranks of dp_replicate have the shards and those of dp_shard the copies, as with a transposed DeviceMesh."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        has_copies = config.mesh.axes == (REPLICATE,)
        transposed = seams_engines.reordered_device_mesh(fsdp2, seams_engines.transpose_ranks)
        with transposed if has_copies else nullcontext():
            super().__init__(model, config)


@mutant(
    FaultKind.SHARDS,
    on_mesh("mesh.replicas", Part.GATHER, model="heads", cause=f"{OWNERS}, 1 along tp instead of 2"),
    origin=Origin.MESH,
)
class SplitsNoLayerOverTensorRanks(MeshWrapper):
    """The ranks of tp have shards of the data, with the same batch, where the plan splits layers over them."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, replace(config, mesh=DEFAULT_MESH) if config.mesh.size(TENSOR) > 1 else config)


@mutant(FaultKind.SHARDS, on_owners("cp2", "context", "2 along cp instead of 1"), origin=Origin.MESH)
class ShardsNothingOverSequenceRanks(EngineWrapper):
    """The ranks of a sequence have whole weights and states, where each has to have a shard."""

    wraps = "deepspeed"
    stages = (1, 2)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, replace(config, stage=0) if config.mesh.size(CONTEXT) > 1 else config)


@mutant(FaultKind.SHARDS, on_owners("ep2", "routed", "2 along ep instead of 1"), origin=Origin.MESH)
class CopiesExpertsToAllRanks(EngineWrapper):
    """Every rank of ep has all experts, where each has to have its own."""

    wraps = "deepspeed"

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, replace(config, mesh=DEFAULT_MESH) if config.mesh.size(EXPERT) > 1 else config)


class LeavesOutTheLast(EngineWrapper):
    """The base class of mutants whose layout leaves out the last rank, so that no rank owns its shards."""

    wraps = "deepspeed"

    def layout(self) -> Mapping[str, tuple[Piece, ...]]:
        last, original = dist.get_world_size() - 1, self.base.layout()
        if not self.config.mesh.sizes:
            return dict(original)
        return {name: tuple(piece for piece in pieces if piece.rank != last) for name, pieces in original.items()}


@mutant(FaultKind.SHARDS, on_owners("cp2", "context", "0 along cp instead of 1"), origin=Origin.MESH)
class LeavesOutTheLastSequenceRank(LeavesOutTheLast):
    """No rank owns the shards of the last rank of a sequence."""

    stages = (1, 2)


@mutant(FaultKind.SHARDS, on_owners("ep2", "routed", "0 along ep instead of 1"), origin=Origin.MESH)
class LeavesOutTheLastExpertRank(LeavesOutTheLast):
    """No rank owns the experts of the last rank of ep."""
