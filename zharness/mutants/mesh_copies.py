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
from zharness.mutants.around import Around
from zharness.mutants.mesh import REP2, on_mesh
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.parity import Part


class OverCopies(Around):
    """The base class of mutants of copies; ``copies`` is their number, and ``copy`` that of this rank."""

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
        seams_stage3.wrap_sum_over_copies(self.right, lambda right: lambda shard: change(shard, right))


@mutant(FaultKind.CONTRIBUTION, on_mesh(mesh=REP2), origin=Origin.MESH)
class LeavesOutTheSumOverCopies(OverCopies):
    """A gradient is reduced within each copy, and not over the copies."""

    def spoil(self) -> None:
        self.change_sum_over_copies(lambda shard, right: shard)


@mutant(FaultKind.CONTRIBUTION, on_mesh(mesh=REP2), origin=Origin.MESH)
class SumsOverCopiesTwice(OverCopies):
    """A gradient is added up over the copies twice."""

    def spoil(self) -> None:
        self.change_sum_over_copies(lambda shard, right: right(right(shard)))


@mutant(
    FaultKind.RESOURCES,
    on_mesh("resources.comm_volume", model="mlp", mesh=REP2, parameter="sent"),
    origin=Origin.MESH,
)
class SendsAcrossCopiesTwice(OverCopies):
    """Each shard is sent across the copies once more, and what is added up the second time is dropped."""

    def spoil(self) -> None:
        def send_again(shard: Tensor, right: Callable[[Tensor], Tensor]) -> Tensor:
            right(shard.clone())
            return right(shard)

        self.change_sum_over_copies(send_again)


@mutant(FaultKind.CONTRIBUTION, on_mesh(mesh=REP2), origin=Origin.MESH)
class SumsShardsOfOneCopy(OverCopies):
    """The sum over copies runs over the wrong axis: over the different shards of one copy."""

    def spoil(self) -> None:
        def add_neighbours(shard: Tensor, right: Callable[[Tensor], Tensor]) -> Tensor:
            return seams.comm(self.right).all_reduce(shard)

        self.change_sum_over_copies(add_neighbours)


@mutant(FaultKind.SCALE, on_mesh("mesh.one_hot", mesh=REP2), origin=Origin.MESH)
class DividesByTheShardsOfACopy(OverCopies):
    """The sum over all ranks is divided by the number of ranks of one copy."""

    def spoil(self) -> None:
        seams.set_divisor(self.right, seams.divisor(self.right) // self.copies)


@mutant(FaultKind.CONTRIBUTION, on_mesh("mesh.one_hot", mesh=REP2), origin=Origin.MESH)
class TakesTheFirstCopyAlone(OverCopies):
    """The gradient of the first copy, times the number of copies, stands for those of all."""

    def spoil(self) -> None:
        def keep_first(shard: Tensor, right: Callable[[Tensor], Tensor]) -> Tensor:
            return right(shard * float(self.copies if self.copy == 0 else 0))

        self.change_sum_over_copies(keep_first)


@mutant(FaultKind.RANKS, on_mesh("mesh.replicas", mesh=REP2), origin=Origin.MESH)
class TheSecondCopyKeepsItsOwnSum(OverCopies):
    """The sum over copies reaches the first copy alone."""

    def spoil(self) -> None:
        def keep_own(shard: Tensor, right: Callable[[Tensor], Tensor]) -> Tensor:
            total = right(shard.clone())
            return shard if self.copy else total

        self.change_sum_over_copies(keep_own)


@mutant(
    FaultKind.CLIPPING,
    on_mesh(
        "mesh.norm", parameter="norm", mesh=REP2, cause="it counts what 2 ranks of dp_replicate have in common 2 times"
    ),
    origin=Origin.MESH,
)
class NormCountsEachCopy(OverCopies):
    """The norm adds the squares of all ranks, so that it counts each element once for each copy."""

    def spoil(self) -> None:
        seams.wrap_grad_norm(self.right, lambda right: lambda: right() * math.sqrt(self.copies))


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
class LayoutTakesNeighboursForCopies(OverCopies):
    """``layout()`` says that neighbours own the same elements, as if the copies were the inner axis."""

    def layout(self) -> Mapping[str, tuple[Piece, ...]]:
        right: Mapping[str, tuple[Piece, ...]] = self.right.layout()
        shards = dist.get_world_size() // self.copies
        return {
            name: tuple(
                Piece(piece.rank % shards * self.copies + piece.rank // shards, piece.start, piece.stop)
                for piece in pieces
            )
            for name, pieces in right.items()
        }


@mutant(FaultKind.STALE, on_mesh("precision.edited_masters", Part.GATHER, model="mixed", mesh=REP2), origin=Origin.MESH)
class EditsMastersOfTheFirstCopyAlone(OverCopies):
    """An edit of weights in bf16 reaches the masters of the first copy; the next step of the others undoes it."""

    @contextmanager
    def gathered(self, names: Collection[str]) -> Iterator[Mapping[str, Tensor]]:
        """Pass the weights on, and restore the masters of later copies."""
        masters = seams.master_weights(self.right) if self.copy else {}
        before = {name: master.clone() for name, master in masters.items()}
        with self.right.gathered(names) as weights:
            yield weights
        for name, value in before.items():
            masters[name].copy_(value)


def on_low_precision(part: Part, variant: str, parameter: str = "*") -> Target:
    """Return a target of a random program in bf16 on two copies."""
    return Target(
        "training.any_order", part, "mlp", variant, dtype="bf16", parameter=parameter, world_size=4, mesh=REP2
    )


@mutant(FaultKind.STATE, on_low_precision(Part.GATHER, "saved"), origin=Origin.MESH)
class LoadsRoundedMastersIntoTheSecondCopy(OverCopies):
    """In bf16 a load leaves the second copy with fp32 masters that are its rounded weights."""

    def load(self, path: Path) -> None:
        self.right.load(path)
        for master in seams.master_weights(self.right).values() if self.copy else ():
            master.copy_(master.bfloat16())


@mutant(FaultKind.CLIPPING, on_low_precision(Part.REDUCTION, "steps", "norm"), origin=Origin.MESH)
class NormCountsEachCopyInLowPrecision(OverCopies):
    """In bf16 the norm adds the squares of all ranks, so that it counts each element once for each copy."""

    def spoil(self) -> None:
        if self.config.dtype == "bf16":
            seams.wrap_grad_norm(self.right, lambda right: lambda: right() * math.sqrt(self.copies))


@mutant(FaultKind.CONTRIBUTION, on_low_precision(Part.REDUCTION, "windows"), origin=Origin.MESH)
class SumsTheLastOfAWindowOverCopiesInLowPrecision(OverCopies):
    """In bf16 only the last micro-batch of a window that the engine counts is summed over the copies."""

    counted = 0

    def step(self) -> None:
        self.right.step()
        self.counted += 1

    def spoil(self) -> None:
        window = self.config.accumulation_steps
        if self.config.dtype == "bf16":
            self.change_sum_over_copies(
                lambda shard, right: (
                    right(shard) if self.counted % window == window - 1 else shard.mul_(float(self.copies))
                )
            )
