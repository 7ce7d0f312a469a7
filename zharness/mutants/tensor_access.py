"""Mutants that return or replace a wrong gradient, weight or optimizer state if the caller names a parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.engines.tensor_access import SupportsReadOut, SupportsShardAccess, SupportsWriteIn
from zharness.mutants import seams
from zharness.mutants.gradient_norm import compute_norm
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import EngineWrapper
from zharness.parity import Part

MODEL = "similar"


def neighbours(module: nn.Module, full_params: Mapping[str, Tensor]) -> dict[str, str]:
    """Map each parameter's name to the next trained parameter of its shape, or to itself if there is no other."""
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    names = [*trained, *trained]
    found = {}
    for name, weight in full_params.items():
        start = names.index(name) + 1 if name in names else 0
        alike = (other for other in names[start:] if full_params[other].shape == weight.shape)
        found[name] = next(alike, name)
    return found


class TensorAccess(SupportsReadOut, SupportsWriteIn, SupportsShardAccess, Protocol):
    """An engine with all functions that read and replace single tensors."""


class ShardedWrapper(EngineWrapper):
    """The base class of mutants of stage 2, which shards gradients and optimizer state but not weights."""

    stages = (2,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.access: TensorAccess = self.base
        self.neighbour_of = neighbours(self.module, self.base.full_params())


@mutant(FaultKind.SHARDS, Target("access.read_grad", model=MODEL), origin=Origin.ONLOOKERS)
class ReadsTheNeighboursGrad(ShardedWrapper):
    """If the caller reads a gradient, returns the gradient of the next parameter of the same shape."""

    def read_grad(self, name: str) -> Tensor | None:
        return self.access.read_grad(self.neighbour_of[name])


@mutant(
    FaultKind.SCALE,
    Target("access.read_accumulated_grad", model=MODEL, variant="engine"),
    Target("access.read_accumulated_grad", model=MODEL, variant="caller"),
    origin=Origin.ONLOOKERS,
)
class ReadsTheSumOfTheWindow(ShardedWrapper):
    """If the caller reads a gradient, returns it multiplied by the number of micro-batches per step."""

    def read_grad(self, name: str) -> Tensor | None:
        grad = self.access.read_grad(name)
        return None if grad is None else grad * self.config.accumulation_steps


@mutant(FaultKind.CLIPPING, Target("access.read_grad", model=MODEL, variant="clipped"), origin=Origin.ONLOOKERS)
class ReadsTheClippedGrad(ShardedWrapper):
    """If the caller reads a gradient, returns the gradient as it will be after clipping."""

    def read_grad(self, name: str) -> Tensor | None:
        grad = self.access.read_grad(name)
        if grad is None or self.config.clip is None:
            return grad
        factor = min(1.0, self.config.clip / compute_norm(self.base.full_grads()))
        return grad * factor


@mutant(FaultKind.LOSS_SCALE, Target("access.read_scaled_grad", model=MODEL), origin=Origin.ONLOOKERS)
class ReadsTheScaledGrad(ShardedWrapper):
    """If the caller reads a gradient, returns the gradient of the scaled loss, not divided by the loss scale."""

    def read_grad(self, name: str) -> Tensor | None:
        grad = self.access.read_grad(name)
        return None if grad is None else grad * float(self.base.observe().loss_scale)


@mutant(
    FaultKind.CONTRIBUTION,
    Target("access.read_grad_in_window", Part.ACCUMULATION, model=MODEL, variant="caller"),
    origin=Origin.ONLOOKERS,
)
class ReadingEndsTheWindow(ShardedWrapper):
    """If a gradient is read inside an accumulation window, drops the gradients of all earlier micro-batches."""

    backwards, was_read = 0, False

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        if self.was_read and self.backwards < self.config.accumulation_steps:
            self.base.zero_grad()
        self.base.backward(loss, retain_graph=retain_graph)
        self.backwards += 1

    def read_grad(self, name: str) -> Tensor | None:
        self.was_read = True
        return self.access.read_grad(name)


@mutant(FaultKind.SHARDS, Target("access.read_param", Part.GATHER, model=MODEL), origin=Origin.ONLOOKERS)
class ReadsTheNeighboursWeight(ShardedWrapper):
    """If the caller reads a weight, returns the weight of the next parameter of the same shape."""

    def read_param(self, name: str) -> Tensor | None:
        return self.access.read_param(self.neighbour_of[name])


@mutant(FaultKind.STALE, Target("access.read_param", Part.OPTIMIZER, model=MODEL), origin=Origin.ONLOOKERS)
class ReadsTheFirstWeight(ShardedWrapper):
    """If the caller reads a weight again after a step, returns the value from the first reading."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.read_before: dict[str, Tensor] = {}

    def read_param(self, name: str) -> Tensor | None:
        return self.read_before.setdefault(name, self.base.read_param(name)).clone()


@mutant(FaultKind.PARAMETERS, Target("access.read_frozen", Part.GATHER, model=MODEL), origin=Origin.ONLOOKERS)
class ReadsATrainedWeightForAFrozenOne(ShardedWrapper):
    """If the caller reads a frozen weight, returns a trained weight of the same shape."""

    def read_param(self, name: str) -> Tensor | None:
        frozen = not dict(self.module.named_parameters())[name].requires_grad
        return self.access.read_param(self.neighbour_of[name] if frozen else name)


@mutant(
    FaultKind.OPTIMIZER,
    Target("access.read_state", Part.OPTIMIZER, model=MODEL, variant="momentum"),
    Target("access.read_state", Part.OPTIMIZER, model=MODEL, variant="adam"),
    origin=Origin.ONLOOKERS,
)
class ReadsTheNeighboursState(ShardedWrapper):
    """If the caller reads optimizer state, returns the state of the next parameter of the same shape."""

    def read_optimizer_state(self, name: str, key: str) -> Tensor | None:
        return self.access.read_optimizer_state(self.neighbour_of[name], key)


@mutant(
    FaultKind.OPTIMIZER,
    Target("access.read_state", Part.OPTIMIZER, model=MODEL, variant="groups", parameter="*bias/*"),
    origin=Origin.ONLOOKERS,
)
class ReadsZerosOfLaterGroups(ShardedWrapper):
    """If the caller reads optimizer state of a parameter outside the first parameter group, returns zeros."""

    def read_optimizer_state(self, name: str, key: str) -> Tensor | None:
        state: Tensor = self.base.read_optimizer_state(name, key)
        in_later_group = len(self.config.optimizer.groups) > 0 and name.endswith("bias")
        return torch.zeros_like(state) if in_later_group else state


@mutant(
    FaultKind.STALE,
    Target("access.write_grad", Part.OPTIMIZER, model=MODEL),
    Target("access.write_grad", Part.OPTIMIZER, model=MODEL, variant="twice"),
    origin=Origin.ONLOOKERS,
)
class WritesAGradThatNoStepUses(ShardedWrapper):
    """Returns the new gradient if the caller reads it after a write, but steps with the gradient before the write."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.written: dict[str, Tensor] = {}

    def write_grad(self, name: str, value: Tensor) -> None:
        self.written[name] = value.clone()

    def read_grad(self, name: str) -> Tensor | None:
        return self.written[name] if name in self.written else self.access.read_grad(name)


@mutant(FaultKind.SHARDS, Target("access.write_grad", model=MODEL, variant="one"), origin=Origin.ONLOOKERS)
class WritesTheNeighboursGradToo(ShardedWrapper):
    """If the caller replaces a gradient, also replaces the gradient of the next parameter of the same shape."""

    def write_grad(self, name: str, value: Tensor) -> None:
        self.access.write_grad(self.neighbour_of[name], value)
        self.access.write_grad(name, value)


@mutant(
    FaultKind.CLIPPING,
    Target("access.write_grad", model=MODEL, variant="clipped", parameter="norm"),
    Target("access.write_grad", model=MODEL, variant="clipped_shard", parameter="norm"),
    origin=Origin.ONLOOKERS,
)
class NormFromBeforeTheWrite(ShardedWrapper):
    """Clips by the norm of the gradients that backward computed, although the caller has replaced gradients."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.norm_before: float | None = None
        seams.wrap_grad_norm(self.base, lambda norm: lambda: norm() if self.norm_before is None else self.norm_before)

    def remember_norm(self) -> None:
        """Record the norm of the gradients that backward computed, unless a norm is recorded already."""
        if self.norm_before is None:
            self.norm_before = compute_norm(self.base.full_grads())

    def write_grad(self, name: str, value: Tensor) -> None:
        self.remember_norm()
        self.access.write_grad(name, value)

    def write_grad_shard(self, name: str, value: Tensor) -> None:
        self.remember_norm()
        self.access.write_grad_shard(name, value)


@mutant(
    FaultKind.CONTRIBUTION,
    Target("access.write_grad", model=MODEL, variant="caller"),
    Target("access.write_grad", model=MODEL, variant="engine"),
    origin=Origin.ONLOOKERS,
)
class DividesAWrittenGrad(ShardedWrapper):
    """If the caller replaces a gradient, divides the new gradient by the number of micro-batches."""

    def write_grad(self, name: str, value: Tensor) -> None:
        self.access.write_grad(name, value / self.config.accumulation_steps)


@mutant(FaultKind.RANKS, Target("access.write_grad", model=MODEL, variant="shard"), origin=Origin.ONLOOKERS)
class OnlyRank0WritesShards(ShardedWrapper):
    """Ignores the shards of gradients that ranks other than rank 0 replace."""

    def write_grad_shard(self, name: str, value: Tensor) -> None:
        kept = self.access.read_grad_shard(name)
        self.access.write_grad_shard(name, value if dist.get_rank() == 0 else kept)


@mutant(
    FaultKind.STALE,
    Target("access.write_param", Part.OPTIMIZER, model=MODEL, variant="before_forward"),
    Target("access.write_param", Part.OPTIMIZER, model=MODEL, variant="before_step"),
    origin=Origin.ONLOOKERS,
)
class WritesAWeightThatNoStepUses(ShardedWrapper):
    """Returns the new weight if the caller reads it after a write, but steps from the weight before the write."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.written: dict[str, Tensor] = {}

    def write_param(self, name: str, value: Tensor) -> None:
        self.written[name] = value.clone()

    def read_param(self, name: str) -> Tensor | None:
        return self.written[name] if name in self.written else self.access.read_param(name)


@mutant(
    FaultKind.STALE,
    Target("access.write_param", Part.GATHER, model=MODEL, variant="forward"),
    origin=Origin.ONLOOKERS,
)
class WritesAWeightForTheStepOnly(ShardedWrapper):
    """Writes only the shard of the weight that this rank's optimizer updates.

    The next forward still uses the old values of the other ranks' shards.
    """

    def write_param(self, name: str, value: Tensor) -> None:
        start, stop = seams.model_params(self.base)[name].layout.shard_bounds(dist.get_rank())
        seams.leaves(self.base)[name].copy_(value.flatten()[start:stop])


@mutant(
    FaultKind.RANKS, Target("access.write_param", Part.GATHER, model=MODEL, variant="shard"), origin=Origin.ONLOOKERS
)
class OnlyRank0WritesShardsOfWeights(ShardedWrapper):
    """Ignores the shards of weights that ranks other than rank 0 replace."""

    def write_param_shard(self, name: str, value: Tensor) -> None:
        kept = self.access.read_param_shard(name)
        self.access.write_param_shard(name, value if dist.get_rank() == 0 else kept)


@mutant(
    FaultKind.SHARDS,
    Target("access.write_param", Part.GATHER, model=MODEL, variant="before_forward", parameter="shift"),
    Target("access.write_param", Part.GATHER, model=MODEL, variant="before_step", parameter="shift"),
    origin=Origin.ONLOOKERS,
)
class WritesNoShortShard(EngineWrapper):
    """Does not replace the elements of a shard in ``write_param`` if the shard is shorter than the longest shard."""

    stages = (1, 3)

    def write_param(self, name: str, value: Tensor) -> None:
        written, before = value.clone(), self.base.read_param(name)
        pieces = self.base.layout()[name]
        longest = max(piece.stop - piece.start for piece in pieces)
        for piece in pieces:
            if piece.stop - piece.start < longest:
                written.flatten()[piece.start : piece.stop] = before.flatten()[piece.start : piece.stop]
        self.base.write_param(name, written)


@mutant(
    FaultKind.OPTIMIZER,
    Target("access.write_state", Part.OPTIMIZER, model=MODEL, variant="momentum"),
    Target("access.write_state", Part.OPTIMIZER, model=MODEL, variant="adam"),
    origin=Origin.ONLOOKERS,
)
class WritesStateThatNoStepUses(ShardedWrapper):
    """Returns the new optimizer state until the next step, which starts from the state before the write."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.written: dict[tuple[str, str], Tensor] = {}

    def write_optimizer_state(self, name: str, key: str, value: Tensor) -> None:
        self.written[name, key] = value.clone()

    def read_optimizer_state(self, name: str, key: str) -> Tensor | None:
        return self.written[name, key] if (name, key) in self.written else self.access.read_optimizer_state(name, key)

    def step(self) -> None:
        self.base.step()
        self.written.clear()


@mutant(
    FaultKind.RANKS,
    Target("access.write_state", Part.OPTIMIZER, model=MODEL, variant="momentum_shard"),
    Target("access.write_state", Part.OPTIMIZER, model=MODEL, variant="adam_shard"),
    origin=Origin.ONLOOKERS,
)
class OnlyRank0WritesShardsOfState(ShardedWrapper):
    """Ignores the shards of optimizer state that ranks other than rank 0 replace."""

    def write_optimizer_state_shard(self, name: str, key: str, value: Tensor) -> None:
        if dist.get_rank() == 0:
            self.access.write_optimizer_state_shard(name, key, value)


@mutant(
    FaultKind.SHARDS,
    Target("access.read_shard", Part.GATHER, model=MODEL, variant="grad"),
    Target("access.read_shard", Part.GATHER, model=MODEL, variant="param"),
    Target("access.read_shard", Part.GATHER, model=MODEL, variant="state"),
    origin=Origin.ONLOOKERS,
)
class ReadsTheNeighboursShards(ShardedWrapper):
    """If the caller reads a rank's shard of a tensor, returns the shard of the next parameter of the same shape."""

    def read_grad_shard(self, name: str) -> Tensor:
        return self.access.read_grad_shard(self.neighbour_of[name])

    def read_param_shard(self, name: str) -> Tensor:
        return self.access.read_param_shard(self.neighbour_of[name])

    def read_optimizer_state_shard(self, name: str, key: str) -> Tensor:
        return self.access.read_optimizer_state_shard(self.neighbour_of[name], key)
