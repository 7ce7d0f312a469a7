"""Define mutants whose ranks start with other weights than rank 0's, although the engine promises rank 0's weights."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.law_kit.buffers import copy_buffers, restore_buffers
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import DDPWrapper, EngineWrapper
from zharness.parity import Part


def on_initial(parameter: str, variant: str = "", world_size: int = 2, mesh: str = "") -> Target:
    """Return a target of the law parameters.initial_weights."""
    law = "parameters.initial_weights"
    return Target(law, Part.GATHER, "odd_one", variant, parameter=parameter, world_size=world_size, mesh=mesh)


def copy_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a mapping from the names of the weights to copies of the weights."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@mutant(FaultKind.RANKS, on_initial("last.bias"), origin=Origin.SHARDS)
class BroadcastsAllButTheLastWeight(DDPWrapper):
    """Does not broadcast the last parameter, so that each rank keeps the last parameter of its own model."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        name, own = list(copy_weights(model).items())[-1]
        super().__init__(model, config)
        with torch.no_grad():
            self.module.get_parameter(name).copy_(own)


@mutant(FaultKind.RANKS, on_initial("*.weight"), origin=Origin.SHARDS)
class BeginsWithTheLastRanksWeights(DDPWrapper):
    """Starts all ranks with the weights of the last rank instead of those of rank 0."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), dist.get_world_size() - 1)
        super().__init__(model, config)


@mutant(FaultKind.RANKS, on_initial("seen", "buffers"), origin=Origin.SHARDS)
class LeavesInitialBuffersApart(DDPWrapper):
    """Broadcasts the weights but not the buffers, so that each rank keeps its own buffers."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        own = copy_buffers(model)
        super().__init__(model, config)
        restore_buffers(self.module, own)


@mutant(FaultKind.RANKS, on_initial("odd", world_size=4, mesh="rep2"), origin=Origin.MESH)
class OneRankKeepsItsWeights(EngineWrapper):
    """Starts the last rank of the last copy with the weights of that rank's own model."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        own = copy_weights(model)
        super().__init__(model, config)
        if dist.get_rank() == dist.get_world_size() - 1:
            with torch.no_grad():
                for name, parameter in self.module.named_parameters():
                    parameter.copy_(own[name])
