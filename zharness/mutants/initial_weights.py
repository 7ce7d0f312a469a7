"""Define mutants whose ranks begin with other weights than rank 0's, though the engine promises these."""

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
    """Return a target of the law of initial weights that differ between ranks."""
    law = "parameters.initial_weights"
    return Target(law, Part.GATHER, "odd_one", variant, parameter=parameter, world_size=world_size, mesh=mesh)


def copy_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the weights by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@mutant(FaultKind.RANKS, on_initial("last.bias"), origin=Origin.SHARDS)
class BroadcastsAllButTheLastWeight(DDPWrapper):
    """Each rank keeps the last parameter of its own model."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        name, own = list(copy_weights(model).items())[-1]
        super().__init__(model, config)
        with torch.no_grad():
            self.module.get_parameter(name).copy_(own)


@mutant(FaultKind.RANKS, on_initial("*.weight"), origin=Origin.SHARDS)
class BeginsWithTheLastRanksWeights(DDPWrapper):
    """All ranks begin with the weights of the last one."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), dist.get_world_size() - 1)
        super().__init__(model, config)


@mutant(FaultKind.RANKS, on_initial("seen", "buffers"), origin=Origin.SHARDS)
class LeavesInitialBuffersApart(DDPWrapper):
    """The weights are broadcast, and each rank keeps its own buffers."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        own = copy_buffers(model)
        super().__init__(model, config)
        restore_buffers(self.module, own)


@mutant(FaultKind.RANKS, on_initial("odd", world_size=4, mesh="rep2"), origin=Origin.MESH)
class OneRankKeepsItsWeights(EngineWrapper):
    """The last rank of the last copy begins with the weights of its own model."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        own = copy_weights(model)
        super().__init__(model, config)
        if dist.get_rank() == dist.get_world_size() - 1:
            with torch.no_grad():
                for name, parameter in self.module.named_parameters():
                    parameter.copy_(own[name])
