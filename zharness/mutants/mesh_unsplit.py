"""Define mutants that leave whole what an axis of the mesh splits, and compute the right numbers."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist
from torch import nn

from zharness.engines import EngineConfig
from zharness.mesh import DEFAULT_MESH, REPLICATE, TENSOR, Mesh
from zharness.mutants.mesh import REP2, OverMesh, on_mesh
from zharness.mutants.mutant import FaultKind, Origin, mutant
from zharness.parity import Part


@mutant(
    FaultKind.SHARDS,
    on_mesh("mesh.replicas", Part.GATHER, mesh=REP2, cause="the number of ranks that own the element"),
    origin=Origin.MESH,
)
class CopiesWeightsToAllRanks(OverMesh):
    """Every rank has all weights, where the mesh has two copies of them, each in shards."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        copies = Mesh.parse(f"rep{dist.get_world_size()}")
        super().__init__(model, replace(config, mesh=copies) if config.mesh.size(REPLICATE) > 1 else config)


@mutant(
    FaultKind.SHARDS,
    on_mesh("mesh.replicas", Part.GATHER, model="heads", cause="the number of ranks that own the element"),
    origin=Origin.MESH,
)
class SplitsNoLayerOverTensorRanks(OverMesh):
    """The ranks of tp have shards of the data, with the same batch, where the plan splits layers over them."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, replace(config, mesh=DEFAULT_MESH) if config.mesh.size(TENSOR) > 1 else config)
