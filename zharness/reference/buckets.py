"""Buckets: parameters that cross the wire together, since a collective costs the same for one element as for many."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zharness.comm import Comm
from zharness.reference.layout import Formats, Layout, Original, padded

# Elements of a bucket where the configuration names no size: 4 MiB in fp32, large against a collective's own cost and
# small against a model, since a bucket is packed and unpacked in memory of its own. From a quarter of it up to four
# times as much, a step takes about as long; with all of a model in one bucket, longer.
SIZE = 2**20


@dataclass(frozen=True)
class Bucket:
    """Parameters of one set of dtypes. On the wire they are N rows: row r is rank r's padded shard of each, in turn."""

    members: tuple[Original, ...]

    @property
    def lengths(self) -> list[int]:
        return [original.layout.length for original in self.members]

    @property
    def elements(self) -> int:
        return sum(original.layout.numel for original in self.members)

    def only(self, chosen: Container[str]) -> Bucket:
        """The members among ``chosen`` names."""
        return Bucket(tuple(original for original in self.members if original.name in chosen))

    def reduce_scatter(self, fulls: Sequence[Tensor], comm: Comm) -> Tensor:
        """This rank's row of the sum over ranks of ``fulls``, one full tensor for each member. Collective."""
        rows = torch.cat([_rows(f, o.layout) for f, o in zip(fulls, self.members, strict=True)], dim=1)
        mine = rows.new_empty(rows.shape[1])
        if mine.numel():
            comm.reduce_scatter(mine, rows.view(-1))
        return mine

    def all_reduce(self, fulls: Sequence[Tensor], comm: Comm) -> Tensor:
        """The sum over ranks of ``fulls``, one full tensor for each member, flat and end to end. Collective.

        Nobody keeps a shard of it, so rank r sums the r-th part of the whole: no element is moved to its owner first.
        """
        fill = fulls[0].new_zeros(-self.elements % comm.world_size)
        flat = torch.cat([*(full.reshape(-1) for full in fulls), fill])
        if self.elements:
            mine = flat.view(comm.world_size, -1)[comm.rank]
            comm.all_gather(flat, comm.reduce_scatter(mine, flat))
        return flat[: self.elements]

    def wholes(self, flat: Tensor) -> list[Tensor]:
        """Each member whole, as a view of what ``all_reduce`` gave."""
        parts = torch.split(flat, [original.layout.numel for original in self.members])
        return [part.view(o.layout.shape) for part, o in zip(parts, self.members, strict=True)]

    def shards(self, row: Tensor, rank: int) -> list[Tensor]:
        """What ``rank`` owns of each member, as views of its row."""
        parts = torch.split(row, self.lengths)
        return [part[: o.layout.owned(rank)] for part, o in zip(parts, self.members, strict=True)]

    def join(self, shards: Iterable[Tensor]) -> Tensor:
        """A rank's row, from its shard of each member."""
        return torch.cat([padded(s, length) for s, length in zip(shards, self.lengths, strict=True)])

    def spread(self, rows: Tensor, fulls: Sequence[Tensor]) -> None:
        """Fill ``fulls``, one full tensor for each member, from every rank's row."""
        for part, full, original in zip(torch.split(rows, self.lengths, dim=1), fulls, self.members, strict=True):
            spread(part, full, original.layout)


def spread(shards: Tensor, full: Tensor, layout: Layout) -> None:
    """Fill ``full`` from every rank's padded shard, shape (N, k)."""
    if full.is_contiguous() and full.numel() == shards.numel():
        full.view(shards.shape).copy_(shards)
    else:
        full.copy_(shards.reshape(-1)[: layout.numel].view(layout.shape))


def _rows(full: Tensor, layout: Layout) -> Tensor:
    return padded(full, layout.length * layout.ranks).view(layout.ranks, layout.length)


def buckets(originals: Sequence[Original], size: int = SIZE) -> tuple[Bucket, ...]:
    """Every original in one bucket, of at most ``size`` elements unless a single parameter has more.

    The last come first: backward makes gradients in about that order.
    """
    made: list[list[Original]] = []
    filling: dict[Formats, tuple[list[Original], int]] = {}
    for original in reversed(originals):
        members, elements = filling.get(original.formats, ([], size))
        if not members or elements + original.layout.numel > size:
            members, elements = [], 0
            made.append(members)
        members.append(original)
        filling[original.formats] = members, elements + original.layout.numel
    return tuple(Bucket(tuple(members)) for members in made)
