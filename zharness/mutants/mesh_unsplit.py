"""Define mutants that do not split weights over an axis, or split over another axis, and compute the right numbers."""

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
    """Return a target of the law mesh.replicas on two ranks, which names the axis that has a wrong number of owners."""
    return Target("mesh.replicas", Part.GATHER, model, cause=f"{OWNERS}, {cause}", mesh=mesh)


@mutant(
    FaultKind.SHARDS,
    on_mesh("mesh.replicas", Part.GATHER, mesh=REP2, cause=f"{OWNERS}, 2 along dp_shard instead of 1"),
    origin=Origin.MESH,
)
class CopiesWeightsToAllRanks(MeshWrapper):
    """Gives every rank all weights, although the mesh has two sharded copies of the weights."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        copies = Mesh.parse(f"rep{dist.get_world_size()}")
        super().__init__(model, replace(config, mesh=copies) if config.mesh.size(REPLICATE) > 1 else config)


@mutant(FaultKind.SHARDS, on_mesh("mesh.replicas", Part.GATHER, mesh=REP2, cause=ALONG_COPIES), origin=Origin.MESH)
class ShardsAlongTheAxisOfCopies(MeshWrapper):
    """Shards the weights over dp_replicate and copies them over dp_shard, as with a transposed DeviceMesh."""

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
    """Uses the ranks of tp as ranks of the data with the same batch, although the plan splits layers over tp."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, replace(config, mesh=DEFAULT_MESH) if config.mesh.size(TENSOR) > 1 else config)


@mutant(FaultKind.SHARDS, on_owners("cp2", "context", "2 along cp instead of 1"), origin=Origin.MESH)
class ShardsNothingOverSequenceRanks(EngineWrapper):
    """Keeps whole weights and optimizer state on the ranks of a sequence, although each rank should have a shard."""

    wraps = "deepspeed"
    stages = (1, 2)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, replace(config, stage=0) if config.mesh.size(CONTEXT) > 1 else config)


@mutant(FaultKind.SHARDS, on_owners("ep2", "routed", "2 along ep instead of 1"), origin=Origin.MESH)
class CopiesExpertsToAllRanks(EngineWrapper):
    """Keeps all experts on every rank of ep, although each rank should have its own experts."""

    wraps = "deepspeed"

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, replace(config, mesh=DEFAULT_MESH) if config.mesh.size(EXPERT) > 1 else config)


class LeavesOutTheLast(EngineWrapper):
    """The base class of mutants whose layout leaves out the last rank, so that no rank owns the last rank's shards."""

    wraps = "deepspeed"

    def layout(self) -> Mapping[str, tuple[Piece, ...]]:
        last, original = dist.get_world_size() - 1, self.base.layout()
        if not self.config.mesh.sizes:
            return dict(original)
        return {name: tuple(piece for piece in pieces if piece.rank != last) for name, pieces in original.items()}


@mutant(FaultKind.SHARDS, on_owners("cp2", "context", "0 along cp instead of 1"), origin=Origin.MESH)
class LeavesOutTheLastSequenceRank(LeavesOutTheLast):
    """Reports no owner for the shards of the last rank of a sequence in ``layout()``."""

    stages = (1, 2)


@mutant(FaultKind.SHARDS, on_owners("ep2", "routed", "0 along ep instead of 1"), origin=Origin.MESH)
class LeavesOutTheLastExpertRank(LeavesOutTheLast):
    """Reports no owner for the experts of the last rank of ep in ``layout()``."""
