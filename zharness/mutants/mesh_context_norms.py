"""Define mutants of the norm and of clipping on the sequence axis cp. They wrap DeepSpeed's Ulysses, and need it."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from zharness.mutants import seams_engines
from zharness.mutants.mesh_context import UlyssesWrapper, on_context
from zharness.mutants.mutant import FaultKind, Origin, mutant
from zharness.parity import Part

COUNTS_EACH_RANK = "counts what 2 ranks of cp have in common 2 times"
OF_THE_OWN_SHARD = " is the norm of what rank "


class SequenceNormWrapper(UlyssesWrapper):
    """The base class of mutants that replace the norm by which DeepSpeed clips and which DeepSpeed reports."""

    stages = (1, 2)

    def spoil(self) -> None:
        seams_engines.wrap_global_norm(self.base, lambda original: lambda: self.changed_norm(original()))

    def changed_norm(self, norm: Tensor) -> Tensor:
        """Return the norm that replaces ``norm``."""
        raise NotImplementedError


@mutant(
    FaultKind.CLIPPING,
    on_context(law="mesh.norm", parameter="norm", cause=f"it {COUNTS_EACH_RANK}"),
    on_context(law="mesh.norm", parameter="norm", world_size=4, cause=f"it {COUNTS_EACH_RANK}"),
    on_context(Part.OPTIMIZER, "mesh.clip", cause=COUNTS_EACH_RANK),
    origin=Origin.MESH,
)
class NormCountsEachRankOfASequence(SequenceNormWrapper):
    """Adds the squares of one gradient in the norm once for each rank of a sequence."""

    def changed_norm(self, norm: Tensor) -> Tensor:
        return norm * math.sqrt(self.size)


class NormOfPartsWrapper(SequenceNormWrapper):
    """The base class of mutants that compute the norm of gradients which are not yet summed over the sequence."""

    def spoil(self) -> None:
        super().spoil()
        self.squares = torch.zeros(())
        for parameter in self.module.parameters():
            parameter.register_hook(self.add_squares)  # type: ignore[no-untyped-call]

    def add_squares(self, grad: Tensor) -> None:
        """Add the sum of squares of one gradient of this rank's part."""
        self.squares += grad.square().sum()


@mutant(FaultKind.CLIPPING, on_context(law="mesh.norm", parameter="norm"), origin=Origin.MESH)
class NormOfGradientsBeforeTheirSum(NormOfPartsWrapper):
    """Computes the norm from the gradients of all parts, before these gradients are summed over the sequence."""

    def changed_norm(self, norm: Tensor) -> Tensor:
        total = self.squares.clone()
        dist.all_reduce(total)
        return total.sqrt().to(norm.dtype) * self.size / dist.get_world_size()


class WithoutReportedNorm(SequenceNormWrapper):
    """The base class of mutants that report no norm, so that only clipping shows which norm they compute."""

    def grad_norm(self) -> None:
        """Return no norm."""


@mutant(FaultKind.CLIPPING, on_context(Part.OPTIMIZER, "mesh.clip"), origin=Origin.MESH)
class ClipsByTheNormOfOnePart(WithoutReportedNorm, NormOfPartsWrapper):
    """Clips each rank's shard by the norm of the gradient of that rank's part of a sequence, and reports no norm."""

    def changed_norm(self, norm: Tensor) -> Tensor:
        return self.squares.sqrt().to(norm.dtype)


@mutant(
    FaultKind.CLIPPING,
    on_context(Part.OPTIMIZER, "mesh.clip", cause=OF_THE_OWN_SHARD),
    on_context(Part.OPTIMIZER, "mesh.clip", world_size=4, cause=OF_THE_OWN_SHARD),
    origin=Origin.MESH,
)
class ClipsByTheNormOfTheOwnShard(WithoutReportedNorm):
    """Clips each rank's shard of the gradient by the norm of that shard alone, and reports no norm."""

    def changed_norm(self, norm: Tensor) -> Tensor:
        return self.owned_squares.sqrt().to(norm.dtype)

    def step(self) -> None:
        grads, rank = self.base.full_grads(), dist.get_rank()
        pieces = {name: [p for p in each if p.rank == rank] for name, each in self.base.layout().items()}
        flat = {name: grads[name].flatten() for name in pieces if name in grads}
        owned = [flat[name][p.start : p.stop] for name in flat for p in pieces[name]]
        self.owned_squares = torch.stack([part.square().sum() for part in owned]).sum()
        self.base.step()
