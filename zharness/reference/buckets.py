"""Group parameters into buckets that are each sent in one collective, because many small collectives are slow."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zharness.comm import Comm, join
from zharness.reference.layout import ModelParam, ParamDtypes, ShardLayout, pad_flat

# The default number of elements of a bucket, 4 MiB in fp32: large compared with a collective's fixed cost, and small
# compared with a model, because packing a bucket copies it. Steps take about as long with a quarter or four times of
# this size, and longer with the whole model in one bucket.
DEFAULT_BUCKET_SIZE = 2**20


@dataclass(frozen=True)
class Bucket:
    """Parameters of the same dtypes that are sent as N rows; row r has rank r's padded shards of all members."""

    members: tuple[ModelParam, ...]

    @property
    def shard_lengths(self) -> list[int]:
        """The number of elements of one padded shard of each member."""
        return [param.layout.shard_length for param in self.members]

    @property
    def numel(self) -> int:
        """The total number of elements of all members of the bucket."""
        return sum(param.layout.numel for param in self.members)

    def select(self, names: Container[str]) -> Bucket:
        """Return a new bucket with only those members whose names are in ``names``."""
        return Bucket(tuple(param for param in self.members if param.name in names))

    def reduce_scatter(self, full_tensors: Sequence[Tensor], comm: Comm) -> Tensor:
        """Reduce-scatter one full tensor per member, and return this rank's row of the sum. This is a collective."""
        packed = [_pack_rows(full, param.layout) for full, param in zip(full_tensors, self.members, strict=True)]
        rows = join(packed, dim=1)
        own_row = rows.new_empty(rows.shape[1])
        if own_row.numel():
            comm.reduce_scatter(own_row, rows.view(-1))
        return own_row

    def all_reduce(self, full_tensors: Sequence[Tensor], comm: Comm) -> Tensor:
        """All-reduce one full tensor for each member; return the sums in one flat tensor. This is a collective.

        No rank keeps a shard of the sums, so rank r sums the r-th part of the flat tensor, which may cut a member.
        """
        padding = full_tensors[0].new_zeros(-self.numel % comm.world_size)
        flat = join([*(full.reshape(-1) for full in full_tensors), padding])
        if self.numel:
            own_part = flat.view(comm.world_size, -1)[comm.rank]
            comm.all_gather(flat, comm.reduce_scatter(own_part, flat))
        return flat[: self.numel]

    def split_full_tensors(self, flat: Tensor) -> list[Tensor]:
        """Return the full tensor of each member as a view of ``flat``, which ``all_reduce`` returned."""
        parts = torch.split(flat, [param.layout.numel for param in self.members])
        return [part.view(param.layout.shape) for part, param in zip(parts, self.members, strict=True)]

    def split_shards(self, row: Tensor, rank: int) -> list[Tensor]:
        """Return the elements that ``rank`` owns of each member, as views of its row without padding."""
        parts = torch.split(row, self.shard_lengths)
        return [part[: param.layout.owned_numel(rank)] for part, param in zip(parts, self.members, strict=True)]

    def pack_shards(self, shards: Iterable[Tensor]) -> Tensor:
        """Return a rank's row: the rank's shards of all members, padded and joined."""
        return join([pad_flat(s, length) for s, length in zip(shards, self.shard_lengths, strict=True)])

    def unpack_rows(self, rows: Tensor, full_tensors: Sequence[Tensor]) -> None:
        """Fill the full tensor of each member from ``rows``, which has the rows of all ranks."""
        parts = torch.split(rows, self.shard_lengths, dim=1)
        for part, full, param in zip(parts, full_tensors, self.members, strict=True):
            copy_shards_to_full(part, full, param.layout)


def copy_shards_to_full(shards: Tensor, full: Tensor, layout: ShardLayout) -> None:
    """Fill ``full`` from ``shards``, which has the padded shards of all N ranks and the shape (N, shard length)."""
    if full.is_contiguous() and full.numel() == shards.numel():
        full.view(shards.shape).copy_(shards)
    else:
        full.copy_(shards.reshape(-1)[: layout.numel].view(layout.shape))


def _pack_rows(full: Tensor, layout: ShardLayout) -> Tensor:
    """Return a full tensor as N rows, where row r is rank r's padded shard."""
    return pad_flat(full, layout.shard_length * layout.world_size).view(layout.world_size, layout.shard_length)


def assign_buckets(model_params: Sequence[ModelParam], size: int = DEFAULT_BUCKET_SIZE) -> tuple[Bucket, ...]:
    """Assign every parameter to one bucket of at most ``size`` elements; a larger parameter gets a bucket of its own.

    The first bucket has the last parameters of the model, since backward computes gradients in about that order.
    """
    buckets: list[list[ModelParam]] = []
    open_buckets: dict[ParamDtypes, tuple[list[ModelParam], int]] = {}
    for param in reversed(model_params):
        members, elements = open_buckets.get(param.dtypes, ([], size))
        if not members or elements + param.layout.numel > size:
            members, elements = [], 0
            buckets.append(members)
        members.append(param)
        open_buckets[param.dtypes] = members, elements + param.layout.numel
    return tuple(Bucket(tuple(members)) for members in buckets)
