"""Shards in the wrong order, without their edges; weights that are stale, or were never written; norms and clipping."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.mutants.around import Around
from zharness.mutants.mutant import Kind, Mutant, Target, deepspeed
from zharness.parity import Part


class PublishesInTheWrongOrder(Around):
    """After the step each shard of a weight lands where the next rank's belongs."""

    stages = (1,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        parameters = self.right.engine._parameters
        share = parameters._share_shards

        def slipped(names: Container[str]) -> None:
            share(names)
            with torch.no_grad():
                for parameter in self.module.parameters():
                    parameter.copy_(parameter.reshape(-1).roll(-(-parameter.numel() // 2)).view_as(parameter))

        parameters._share_shards = slipped


class ReducedShards(Around, ABC):
    """Changes each gradient shard on its way out of the reduction."""

    stages = (2,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        gradients = self.right.engine._gradients
        reduce = gradients._reduce
        gradients._reduce = lambda bucket: [self.changed(shard) for shard in reduce(bucket)]

    @abstractmethod
    def changed(self, shard: Tensor) -> Tensor:
        """What becomes of this rank's elements."""


class LosesTheShardsEdge(ReducedShards):
    """The last element of each rank's shard of a gradient is zero."""

    def changed(self, shard: Tensor) -> Tensor:
        shard[-1:] = 0
        return shard


class SlipsByOneElement(ReducedShards):
    """Each rank's shard of a gradient is off by one element."""

    def changed(self, shard: Tensor) -> Tensor:
        return shard.roll(1)


class DropsTheShortShard(Around):
    """Where the ranks do not divide a weight's elements, the short shard is never updated."""

    stages = (3,)

    def step(self) -> None:
        parameters = self.right.engine._parameters
        kept = [
            (parameters.leaves[name], parameters.leaves[name].clone())
            for name, original in parameters._originals.items()
            if original.layout.owned(dist.get_rank()) < original.layout.length
        ]
        self.right.step()
        with torch.no_grad():
            for leaf, before in kept:
                leaf.copy_(before)
        parameters.publish(parameters.leaves)


class NeverPublishes(Around):
    """The optimizer's new weights never reach the model."""

    stages = (1,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.right.engine._parameters.publish = lambda names: None


class Older(torch.autograd.Function):
    """A weight as it was, whose gradient goes to the weight as it is."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, before: Tensor) -> Tensor:
        return before.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class ForwardsWithTheWeightsBefore(Around):
    """Its forward computes with the weights from before the last step, as one that gathered them too early does."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.before = {name: p.detach().clone() for name, p in self.module.named_parameters()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stale = {name: Older.apply(p, self.before[name]) for name, p in self.module.named_parameters()}  # type: ignore[no-untyped-call]
        return torch.func.functional_call(self.module, stale, args, kwargs)

    def step(self) -> None:
        self.before = {name: p.detach().clone() for name, p in self.module.named_parameters()}
        self.right.step()


class WritesWeightsUnseen(Around):
    """Steps behind autograd's back: a graph that saved the old weights goes on with the new ones."""

    def step(self) -> None:
        parameters = tuple(self.module.parameters())
        versions = tuple(parameter._version for parameter in parameters)
        self.right.step()
        torch._C._autograd._unsafe_set_version_counter(parameters, versions)


class ReadsFreshMemory(Around):
    """Adds memory that nobody wrote, times zero, to every gradient."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.right.backward(loss, retain_graph=retain_graph)
        for parameter in self.trained():
            assert parameter.grad is not None
            parameter.grad = parameter.grad + 0 * torch.empty_like(parameter)


class NormOfItsOwnShard(Around):
    """Clips by the norm of the gradients that this rank holds, not of all."""

    stages = (2,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        gradients = self.right.engine._gradients
        gradients.norm = lambda: norm_of(gradients._reduced)


def norm_of(grads: Mapping[str, Tensor]) -> float:
    """The 2-norm of all of them together."""
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in grads.values()))


class NormCountsEveryRank(Around):
    """Adds up the squares of all ranks where every rank holds all of them: a norm too large by the root of N."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        gradients = self.right.engine._gradients
        gradients.norm = lambda: norm_of(gradients._reduced) * math.sqrt(dist.get_world_size())


class ClipsToHalf(Around):
    """Clips to half the norm that was asked for."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, replace(config, clip=config.clip and config.clip / 2))


class NeverClips(Around):
    """Reports the norm, and clips nothing."""

    stages = (3,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, replace(config, clip=config.clip and 1e30))


class ClipsEachParameterAlone(Around):
    """Clips each gradient by its own norm."""

    def step(self) -> None:
        if self.config.clip is not None:
            for grad in self.right.engine._gradients.reduced().values():
                grad.mul_(min(1.0, self.config.clip / (float(grad.norm()) + 1e-6)))
        self.right.step()


OPTIMIZER, GATHER = Part.OPTIMIZER, Part.GATHER

MUTANTS = (
    Mutant(
        PublishesInTheWrongOrder,
        Kind.SHARDS,
        (Target("training.trajectory", GATHER, variant="sgd", dtype="bf16"),),
    ),
    Mutant(LosesTheShardsEdge, Kind.SHARDS, (Target("training.grads"),)),
    Mutant(SlipsByOneElement, Kind.SHARDS, (Target("training.grads"),)),
    Mutant(DropsTheShortShard, Kind.SHARDS, (Target("training.sgd_step", OPTIMIZER, parameter="first.bias"),)),
    Mutant(NeverPublishes, Kind.STALE, (Target("training.trajectory", GATHER, variant="adamw", dtype="bf16"),)),
    Mutant(
        ForwardsWithTheWeightsBefore,
        Kind.STALE,
        (Target("training.trajectory", GATHER, variant="sgd", parameter="loss"),),
    ),
    Mutant(
        WritesWeightsUnseen,
        Kind.STALE,
        (Target("double_backward.step_between_retained_backwards", Part.LOCAL_GRADIENT, "blocks"),),
    ),
    Mutant(
        ReadsFreshMemory,
        Kind.STALE,
        (Target("resources.poisoned_memory", None, words="a gradient is not finite"),),
        imitates=deepspeed(8539),
    ),
    Mutant(NormOfItsOwnShard, Kind.CLIPPING, (Target("training.clip_and_norm", parameter="norm"),)),
    Mutant(NormCountsEveryRank, Kind.CLIPPING, (Target("training.clip_and_norm", parameter="norm"),)),
    Mutant(ClipsToHalf, Kind.CLIPPING, (Target("training.clip_and_norm", OPTIMIZER),)),
    Mutant(NeverClips, Kind.CLIPPING, (Target("training.clip_and_norm", OPTIMIZER),)),
    Mutant(ClipsEachParameterAlone, Kind.CLIPPING, (Target("training.clip_and_norm", parameter="norm"),)),
)
