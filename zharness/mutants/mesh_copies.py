"""Define mutants that break copies of sharded weights (HSDP), around the reference engine at stage 3."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import EngineConfig, Piece
from zharness.mesh import REPLICATE
from zharness.mutants import seams, seams_stage3
from zharness.mutants.mesh import REP2, on_mesh
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import EngineWrapper
from zharness.parity import Part


class CopiesWrapper(EngineWrapper):
    """The base class of mutants of copies. ``copies`` is the number of copies; ``copy`` is the index of this rank's."""

    stages = (3,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.copies = config.mesh.size(REPLICATE)
        self.copy = config.mesh.coordinates(dist.get_rank(), dist.get_world_size())[REPLICATE]
        if self.copies > 1:
            self.spoil()

    def spoil(self) -> None:
        """Break the engine; subclasses override this method."""

    def change_sum_over_copies(self, change: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]) -> None:
        """Replace the all-reduce over copies of a shard by ``change(shard, all_reduce)``."""
        seams_stage3.wrap_sum_over_copies(self.base, lambda original: lambda shard: change(shard, original))


@mutant(FaultKind.CONTRIBUTION, on_mesh(mesh=REP2), origin=Origin.MESH)
class LeavesOutTheSumOverCopies(CopiesWrapper):
    """Reduces a gradient within each copy, but not over the copies."""

    def spoil(self) -> None:
        self.change_sum_over_copies(lambda shard, original: shard)


@mutant(FaultKind.CONTRIBUTION, on_mesh(mesh=REP2), origin=Origin.MESH)
class SumsOverCopiesTwice(CopiesWrapper):
    """Adds up a gradient over the copies twice."""

    def spoil(self) -> None:
        self.change_sum_over_copies(lambda shard, original: original(original(shard)))


@mutant(
    FaultKind.RESOURCES,
    on_mesh("resources.comm_volume", model="mlp", mesh=REP2, parameter="sent"),
    origin=Origin.MESH,
)
class SendsAcrossCopiesTwice(CopiesWrapper):
    """Sends each shard across the copies twice, and discards one of the two sums."""

    def spoil(self) -> None:
        def send_again(shard: Tensor, original: Callable[[Tensor], Tensor]) -> Tensor:
            original(shard.clone())
            return original(shard)

        self.change_sum_over_copies(send_again)


@mutant(FaultKind.CONTRIBUTION, on_mesh(mesh=REP2), origin=Origin.MESH)
class SumsShardsOfOneCopy(CopiesWrapper):
    """Sums over the wrong axis: over the different shards of one copy instead of over the copies."""

    def spoil(self) -> None:
        def add_neighbours(shard: Tensor, original: Callable[[Tensor], Tensor]) -> Tensor:
            return seams.comm(self.base).all_reduce(shard)

        self.change_sum_over_copies(add_neighbours)


@mutant(FaultKind.SCALE, on_mesh("mesh.one_hot", mesh=REP2), origin=Origin.MESH)
class DividesByTheShardsOfACopy(CopiesWrapper):
    """Divides the sum over all ranks by the number of ranks of one copy."""

    def spoil(self) -> None:
        seams.set_divisor(self.base, seams.divisor(self.base) // self.copies)


@mutant(FaultKind.CONTRIBUTION, on_mesh("mesh.one_hot", mesh=REP2), origin=Origin.MESH)
class TakesTheFirstCopyAlone(CopiesWrapper):
    """Uses only the gradient of the first copy, multiplied by the number of copies."""

    def spoil(self) -> None:
        def keep_first(shard: Tensor, original: Callable[[Tensor], Tensor]) -> Tensor:
            return original(shard * float(self.copies if self.copy == 0 else 0))

        self.change_sum_over_copies(keep_first)


@mutant(FaultKind.RANKS, on_mesh("mesh.replicas", mesh=REP2), origin=Origin.MESH)
class TheSecondCopyKeepsItsOwnSum(CopiesWrapper):
    """Uses the sum over copies on the first copy alone; every other copy keeps its own gradient."""

    def spoil(self) -> None:
        def keep_own(shard: Tensor, original: Callable[[Tensor], Tensor]) -> Tensor:
            total = original(shard.clone())
            return shard if self.copy else total

        self.change_sum_over_copies(keep_own)


@mutant(
    FaultKind.CLIPPING,
    on_mesh(
        "mesh.norm", parameter="norm", mesh=REP2, cause="it counts what 2 ranks of dp_replicate have in common 2 times"
    ),
    origin=Origin.MESH,
)
class NormCountsEachCopy(CopiesWrapper):
    """Adds the squares of all ranks in the norm, so that each element counts once for each copy."""

    def spoil(self) -> None:
        seams.wrap_grad_norm(self.base, lambda original: lambda: original() * math.sqrt(self.copies))


@mutant(
    FaultKind.SHARDS,
    on_mesh(
        "mesh.replicas",
        Part.GATHER,
        mesh=REP2,
        cause="this is the number of ranks along dp_replicate that own the element by layout()",
    ),
    origin=Origin.MESH,
)
class LayoutTakesNeighboursForCopies(CopiesWrapper):
    """Reports in ``layout()`` that neighbours own the same elements, as if the copies were the inner axis."""

    def layout(self) -> Mapping[str, tuple[Piece, ...]]:
        original: Mapping[str, tuple[Piece, ...]] = self.base.layout()
        shards = dist.get_world_size() // self.copies
        return {
            name: tuple(
                Piece(piece.rank % shards * self.copies + piece.rank // shards, piece.start, piece.stop)
                for piece in pieces
            )
            for name, pieces in original.items()
        }


@mutant(FaultKind.STALE, on_mesh("precision.edited_masters", Part.GATHER, model="mixed", mesh=REP2), origin=Origin.MESH)
class EditsMastersOfTheFirstCopyAlone(CopiesWrapper):
    """Passes an edit of bf16 weights only to the first copy's masters; the other copies' next step undoes the edit."""

    @contextmanager
    def gathered(self, names: Collection[str]) -> Iterator[Mapping[str, Tensor]]:
        """Yield the weights, and then restore the masters of all copies but the first."""
        masters = seams.master_weights(self.base) if self.copy else {}
        before = {name: master.clone() for name, master in masters.items()}
        with self.base.gathered(names) as weights:
            yield weights
        for name, value in before.items():
            masters[name].copy_(value)


def on_low_precision(part: Part, variant: str, parameter: str = "*") -> Target:
    """Return a target of a random program in bf16 on two copies."""
    return Target(
        "training.any_order", part, "mlp", variant, dtype="bf16", parameter=parameter, world_size=4, mesh=REP2
    )


@mutant(FaultKind.STATE, on_low_precision(Part.GATHER, "saved"), origin=Origin.MESH)
class LoadsRoundedMastersIntoTheSecondCopy(CopiesWrapper):
    """In bf16, sets the fp32 masters of the second copy to its rounded weights in a load."""

    def load(self, path: Path) -> None:
        self.base.load(path)
        for master in seams.master_weights(self.base).values() if self.copy else ():
            master.copy_(master.bfloat16())


@mutant(FaultKind.CLIPPING, on_low_precision(Part.REDUCTION, "steps", "norm"), origin=Origin.MESH)
class NormCountsEachCopyInLowPrecision(CopiesWrapper):
    """In bf16, adds the squares of all ranks in the norm, so that each element counts once for each copy."""

    def spoil(self) -> None:
        if self.config.dtype == "bf16":
            seams.wrap_grad_norm(self.base, lambda original: lambda: original() * math.sqrt(self.copies))


@mutant(FaultKind.CONTRIBUTION, on_low_precision(Part.REDUCTION, "windows"), origin=Origin.MESH)
class SumsTheLastOfAWindowOverCopiesInLowPrecision(CopiesWrapper):
    """In bf16, sums only the last micro-batch of an engine's accumulation window over the copies."""

    counted = 0

    def step(self) -> None:
        self.base.step()
        self.counted += 1

    def spoil(self) -> None:
        window = self.config.accumulation_steps
        if self.config.dtype == "bf16":
            self.change_sum_over_copies(
                lambda shard, original: (
                    original(shard) if self.counted % window == window - 1 else shard.mul_(float(self.copies))
                )
            )
