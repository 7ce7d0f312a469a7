"""Buckets: parameters that cross the wire together, since a collective costs the same for one element as for many."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zharness.comm import Comm
from zharness.reference.layout import ModelParam, ParamDtypes, ShardLayout, pad_flat

# Elements of a bucket where the configuration names no size: 4 MiB in fp32, large against a collective's own cost and
# small against a model, since a bucket is packed and unpacked in memory of its own. From a quarter of it up to four
# times as much, a step takes about as long; with all of a model in one bucket, longer.
DEFAULT_BUCKET_SIZE = 2**20


@dataclass(frozen=True)
class Bucket:
    """Parameters of one set of dtypes. On the wire they are N rows: row r is rank r's padded shard of each, in turn."""

    members: tuple[ModelParam, ...]

    @property
    def shard_lengths(self) -> list[int]:
        return [original.layout.shard_length for original in self.members]

    @property
    def numel(self) -> int:
        return sum(original.layout.numel for original in self.members)

    def select(self, names: Container[str]) -> Bucket:
        """The members among ``chosen`` names."""
        return Bucket(tuple(original for original in self.members if original.name in names))

    def reduce_scatter(self, full_tensors: Sequence[Tensor], comm: Comm) -> Tensor:
        """This rank's row of the sum over ranks of ``fulls``, one full tensor for each member. Collective."""
        rows = torch.cat([_pack_rows(f, o.layout) for f, o in zip(full_tensors, self.members, strict=True)], dim=1)
        mine = rows.new_empty(rows.shape[1])
        if mine.numel():
            comm.reduce_scatter(mine, rows.view(-1))
        return mine

    def all_reduce(self, full_tensors: Sequence[Tensor], comm: Comm) -> Tensor:
        """The sum over ranks of ``fulls``, one full tensor for each member, flat and end to end. Collective.

        Nobody keeps a shard of it, so rank r sums the r-th part of the whole: no element is moved to its owner first.
        """
        fill = full_tensors[0].new_zeros(-self.numel % comm.world_size)
        flat = torch.cat([*(full.reshape(-1) for full in full_tensors), fill])
        if self.numel:
            mine = flat.view(comm.world_size, -1)[comm.rank]
            comm.all_gather(flat, comm.reduce_scatter(mine, flat))
        return flat[: self.numel]

    def split_full_tensors(self, flat: Tensor) -> list[Tensor]:
        """Each member whole, as a view of what ``all_reduce`` gave."""
        parts = torch.split(flat, [original.layout.numel for original in self.members])
        return [part.view(o.layout.shape) for part, o in zip(parts, self.members, strict=True)]

    def split_shards(self, row: Tensor, rank: int) -> list[Tensor]:
        """What ``rank`` owns of each member, as views of its row."""
        parts = torch.split(row, self.shard_lengths)
        return [part[: o.layout.owned_numel(rank)] for part, o in zip(parts, self.members, strict=True)]

    def pack_shards(self, shards: Iterable[Tensor]) -> Tensor:
        """A rank's row, from its shard of each member."""
        return torch.cat([pad_flat(s, length) for s, length in zip(shards, self.shard_lengths, strict=True)])

    def unpack_rows(self, rows: Tensor, full_tensors: Sequence[Tensor]) -> None:
        """Fill ``fulls``, one full tensor for each member, from every rank's row."""
        for part, full, original in zip(
            torch.split(rows, self.shard_lengths, dim=1), full_tensors, self.members, strict=True
        ):
            copy_shards_to_full(part, full, original.layout)


def copy_shards_to_full(shards: Tensor, full: Tensor, layout: ShardLayout) -> None:
    """Fill ``full`` from every rank's padded shard, shape (N, k)."""
    if full.is_contiguous() and full.numel() == shards.numel():
        full.view(shards.shape).copy_(shards)
    else:
        full.copy_(shards.reshape(-1)[: layout.numel].view(layout.shape))


def _pack_rows(full: Tensor, layout: ShardLayout) -> Tensor:
    return pad_flat(full, layout.shard_length * layout.world_size).view(layout.world_size, layout.shard_length)


def assign_buckets(model_params: Sequence[ModelParam], size: int = DEFAULT_BUCKET_SIZE) -> tuple[Bucket, ...]:
    """Every original in one bucket, of at most ``size`` elements unless a single parameter has more.

    The last come first: backward makes gradients in about that order.
    """
    made: list[list[ModelParam]] = []
    filling: dict[ParamDtypes, tuple[list[ModelParam], int]] = {}
    for original in reversed(model_params):
        members, elements = filling.get(original.dtypes, ([], size))
        if not members or elements + original.layout.numel > size:
            members, elements = [], 0
            made.append(members)
        members.append(original)
        filling[original.dtypes] = members, elements + original.layout.numel
    return tuple(Bucket(tuple(members)) for members in made)
