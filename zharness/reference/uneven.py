"""Stage 3's collectives, one parameter at a time: as they are asked for, or, where ranks differ, in rounds.

At stage 3 reading a parameter is a collective, so a branch that one rank takes and another does not would leave the one
waiting for the other. Inside ``engine.uneven()`` nobody waits: before each collective every rank says which one it
wants, and all ranks take part in all that anybody wants. A rank without a gradient adds zeros, and what it owns of the
sum is added to its parameter's gradient. A rank that has left the block goes on taking part until all have left it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, IntEnum

import torch
from torch import Tensor

from zharness.comm import Comm
from zharness.errors import UsageError
from zharness.reference.buckets import Bucket
from zharness.reference.layout import Original, gather, gather_rows


class Mode(Enum):
    """How this rank's collectives run."""

    AT_ONCE = "as they are asked for, alike on all ranks"
    IN_ROUNDS = "after every rank has said what it wants"


class Kind(IntEnum):
    """What a rank wants of the others in one round."""

    NOTHING = 0
    SHARDS = 1
    SPREAD = 2
    MEAN = 3
    FAILED = 4


DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)


@dataclass(frozen=True, order=True)
class Want:
    """One collective: its kind, the parameter's place in the model, and the dtype's in DTYPES."""

    kind: Kind
    index: int = 0
    dtype: int = 0


class Channel:
    """The collectives on sharded parameters. ``originals`` are the model's, in the one order of all ranks.

    ``credits`` get this rank's share of the mean gradient of a parameter that only other ranks used.
    """

    def __init__(self, originals: Sequence[Original], comm: Comm, divisor: int) -> None:
        self.credits: list[Callable[[Original, Tensor], None]] = []
        self._originals = originals
        self._comm = comm
        self._divisor = divisor
        self._index = {original.name: index for index, original in enumerate(originals)}
        self._mode = Mode.AT_ONCE
        self._trail = 0

    def rows(self, bucket: Bucket, row: Tensor) -> Tensor:
        """Every rank's ``row`` of the bucket: shape (N, length of a row). Collective."""
        self._note(Kind.SHARDS, bucket.members, row.dtype)
        return gather_rows(row, self._comm)

    def full(self, original: Original, dtype: torch.dtype) -> Tensor:
        """The full parameter, cast before it crosses the wire. Collective."""
        return self._collect(Kind.SHARDS, original, original.parameter.detach().to(dtype))

    def spread(self, original: Original, shard: Tensor) -> Tensor:
        """The full tensor of every rank's ``shard``, divided: the adjoint of ``mean``. Collective."""
        return self._collect(Kind.SPREAD, original, shard) / (self._divisor_of(original) * original.headroom)

    def mean(self, original: Original, full: Tensor) -> Tensor:
        """This rank's shard of the mean of ``full``, summed in the wire's dtype. Collective."""
        return self._collect(Kind.MEAN, original, original.outgoing(full))

    def means(self, originals: Sequence[Original], fulls: Sequence[Tensor]) -> list[Tensor]:
        """``mean`` of several parameters of one set of dtypes; in one collective, unless ranks differ."""
        if not self.even or not originals:
            return [self.mean(original, full) for original, full in zip(originals, fulls, strict=True)]
        bucket, formats = Bucket(tuple(originals)), originals[0].formats
        self._note(Kind.MEAN, originals, formats.wire)
        row = bucket.reduce_scatter([o.outgoing(full) for o, full in zip(originals, fulls, strict=True)], self._comm)
        mean = row.to(formats.held) / self._divisor_of(originals[0])
        return list(torch.split(mean, bucket.lengths))

    @property
    def even(self) -> bool:
        """Whether all ranks ask for the same collectives now."""
        return self._mode is Mode.AT_ONCE

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """Inside, ranks may ask for different collectives. Collective at its end.

        Raises UsageError inside another such block, and where another rank raised in it.
        """
        self.require_even("another uneven()")
        self._mode = Mode.IN_ROUNDS
        last = Want(Kind.FAILED)
        try:
            yield
            last = Want(Kind.NOTHING)
        finally:
            try:
                while self._mode is Mode.IN_ROUNDS and self._round(last, None):
                    pass
            finally:
                self._mode = Mode.AT_ONCE

    def require_even(self, what: str) -> None:
        """Raises UsageError inside ``uneven``, where ``what`` cannot be had."""
        if self._mode is Mode.IN_ROUNDS:
            raise UsageError(f"{what} was asked for inside uneven(); leave that block before it")

    def _divisor_of(self, original: Original) -> float:
        """Autograd rounds a gradient to its parameter's dtype: where the master's is wider, it divides, not before."""
        return 1 if original.has_master else self._divisor / original.headroom

    def _collect(self, kind: Kind, original: Original, mine: Tensor) -> Tensor:
        want = Want(kind, self._index[original.name], DTYPES.index(mine.dtype))
        if not self.even:
            return self._round(want, mine)[want]
        self._note(kind, [original], mine.dtype)
        return self._run(want, mine)

    def _note(self, kind: Kind, originals: Sequence[Original], dtype: torch.dtype) -> None:
        """Add a collective that all ranks are taken to run alike to the checksum of them, for ``settle``."""
        told = (int(kind), [self._index[original.name] for original in originals], str(dtype))
        self._trail = zlib.crc32(repr(told).encode(), self._trail)

    def settle(self) -> None:
        """Raises UsageError on every rank where ranks gathered or reduced different parameters at once. Collective.

        Equal shapes go through such a collective in silence, and one rank's values are then taken for another's.
        """
        mine = torch.tensor([self._trail], device=self._originals[0].parameter.device)
        self._trail = 0
        trails = self._comm.all_gather(mine.new_empty(self._comm.world_size), mine).tolist()
        others = [rank for rank, trail in enumerate(trails) if trail != trails[0]]
        if others:
            raise UsageError(
                f"rank {', '.join(map(str, others))} used different parameters than rank 0, or in another order, since "
                "the last step, and their values and gradients were mixed: call zero_grad(), and run forwards and "
                "backwards that differ between ranks inside `with engine.uneven():`"
            )

    def _round(self, want: Want, mine: Tensor | None) -> dict[Want, Tensor]:
        """Every rank's want, fulfilled; empty when no rank has any. Raises UsageError when another rank has failed.

        After a failure no rank starts another round: all have learnt of it in this one.
        """
        told = torch.tensor([want.kind, want.index, want.dtype], device=self._originals[0].parameter.device)
        rows = self._comm.all_gather(told.new_empty(3 * self._comm.world_size), told).view(-1, 3).tolist()
        wants = [Want(Kind(kind), index, dtype) for kind, index, dtype in rows]
        failed = [rank for rank, other in enumerate(wants) if other.kind is Kind.FAILED]
        if failed:
            self._mode = Mode.AT_ONCE
            if want.kind is Kind.FAILED:
                return {}
            raise UsageError(f"rank {failed[0]} raised inside uneven(), so the other ranks cannot go on either")
        asked = sorted(set(wants) - {Want(Kind.NOTHING)})
        return {each: self._run(each, mine if each == want else None) for each in asked}

    def _run(self, want: Want, mine: Tensor | None) -> Tensor:
        """One collective; a rank that did not want it has no ``mine``."""
        original, dtype = self._originals[want.index], DTYPES[want.dtype]
        parameter, layout = original.parameter, original.layout
        if want.kind is Kind.SHARDS:
            return gather(parameter.detach().to(dtype), layout, self._comm)
        if want.kind is Kind.SPREAD:
            return gather(parameter.new_zeros(layout.length, dtype=dtype) if mine is None else mine, layout, self._comm)
        full = parameter.new_zeros(layout.shape, dtype=dtype) if mine is None else mine
        shard = Bucket((original,)).reduce_scatter([full], self._comm).to(original.formats.held)
        mean = shard / self._divisor_of(original)
        if mine is None and parameter.requires_grad:
            for credit in self.credits:
                credit(original, mean)
        return mean
