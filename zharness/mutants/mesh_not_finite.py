"""Define mutants in which ranks of a mesh treat a gradient that is not finite on one coordinate differently."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from zharness.engines import EngineConfig
from zharness.mesh import DATA_SHARD, REPLICATE
from zharness.mutants import seams_engines
from zharness.mutants.mesh import REP2, MeshWrapper, local_grad, on_mesh, sum_of_squares
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.parity import Part


def on_not_finite(variant: str, part: Part = Part.OPTIMIZER, mesh: str = "tp2", parameter: str = "*") -> Target:
    """Return a target of the law mesh.not_finite."""
    return on_mesh("mesh.not_finite", part, mesh=mesh, parameter=parameter, variant=variant)


class KnowsOwnGradients(MeshWrapper):
    """The base class of mutants that decide by this rank's part of the gradients."""

    def own_is_finite(self) -> bool:
        """Return whether this rank's parts of all gradients are finite."""
        return all(bool(local_grad(param).isfinite().all()) for _, param in self.params())


@mutant(FaultKind.RANKS, on_not_finite("inf", parameter="first.weight"), origin=Origin.MESH)
class SkipsTheStepWhereItOverflowed(KnowsOwnGradients):
    """Skips the step only on the ranks whose own part of the gradients is not finite; the other ranks make the step."""

    def step(self) -> None:
        if self.own_is_finite():
            self.base.step()


@mutant(FaultKind.RANKS, on_not_finite("nan", parameter="outcome"), origin=Origin.MESH)
class RaisesWhereItOverflowed(KnowsOwnGradients):
    """Raises only on the ranks whose own part of the gradients is not finite; the other ranks make the step."""

    def step(self) -> None:
        if not self.own_is_finite():
            raise FloatingPointError("a gradient is not finite")
        self.base.step()


@mutant(FaultKind.CLIPPING, on_not_finite("inf_clipped"), origin=Origin.MESH)
class ClipsByTheNormOfItsTensorRank(MeshWrapper):
    """Clips on each rank of tp by its own parts' norm, which is finite on the first rank and infinite on the second."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.limit = config.clip

    def step(self) -> None:
        split = list(self.split_params())
        if self.limit is None or not split:
            return self.base.step()  # type: ignore[no-any-return]
        total = sum_of_squares(param for _, param in self.params())
        dist.all_reduce(total, group=split[0].device_mesh.get_group(DATA_SHARD))
        factor = (self.limit / (total.sqrt() + 1e-6)).clamp(max=1.0)
        for _, param in self.params():
            local_grad(param).mul_(factor)
        with seams_engines.without_clipping(self.base):
            self.base.step()
        seams_engines.set_grad_norm(self.base, float("inf"))
        return None


@mutant(FaultKind.CLIPPING, on_not_finite("nan_clipped", Part.REDUCTION, parameter="*norm"), origin=Origin.MESH)
class NormOfTheFirstTensorRankIsFinite(MeshWrapper):
    """Leaves the elements that are not finite out of the norm that each rank reports."""

    def step(self) -> None:
        finite = [local_grad(param).nan_to_num(0.0, 0.0, 0.0).double().square().sum() for _, param in self.params()]
        total = torch.stack(finite).sum()
        dist.all_reduce(total)
        self.base.step()
        seams_engines.set_grad_norm(self.base, float(total.sqrt()))


@mutant(FaultKind.CONTRIBUTION, on_not_finite("nan"), origin=Origin.MESH)
class StepsByTheFiniteElements(MeshWrapper):
    """Replaces the elements of a gradient that are not finite by zero, and makes the step."""

    def step(self) -> None:
        for _, param in self.params():
            local_grad(param).nan_to_num_(0.0, 0.0, 0.0)
        self.base.step()


@mutant(FaultKind.RANKS, on_not_finite("inf", mesh=REP2), origin=Origin.MESH)
class TheSecondCopySkipsTheStep(MeshWrapper):
    """If a gradient is not finite, skips the step on the second copy only; the first copy makes the step."""

    def step(self) -> None:
        bad = torch.stack([~local_grad(param).isfinite().all() for _, param in self.params()]).any().float()
        dist.all_reduce(bad)
        if not bad or self.coordinates[REPLICATE] == 0:
            self.base.step()
