"""The bucket of parameters that was gathered last, at stage 3.

A module reads its parameters one by one, and a collective for each would cost more than the model does. So what is read
is gathered with its whole bucket, its neighbours in the model, for which the next reads ask. Each read copies its
parameter off the shelf; the next bucket, the end of a forward and that of a backward empty it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zharness.reference.buckets import Bucket, spread
from zharness.reference.layout import Original
from zharness.reference.uneven import Channel


@dataclass(frozen=True)
class Lot:
    """A gathered bucket: each member's shards by name, shape (N, k), and the version of the shard that was sent."""

    dtype: torch.dtype
    shards: Mapping[str, Tensor]
    versions: Mapping[str, int]

    def has(self, original: Original, dtype: torch.dtype) -> bool:
        """Whether the parameter is here, in that dtype and as it is now."""
        return dtype == self.dtype and self.versions.get(original.name) == original.parameter._version


class Shelf:
    """Room for one Lot. ``count`` is told of the bytes on it whenever they change."""

    def __init__(self, buckets: Iterable[Bucket], channel: Channel, count: Callable[[int], None]) -> None:
        self._bucket_of = {original.name: bucket for bucket in buckets for original in bucket.members}
        self._channel = channel
        self._count = count
        self._lot: Lot | None = None

    def fetch(self, original: Original, full: Tensor) -> None:
        """Fill ``full`` with the parameter, cast to its dtype before it is sent. Collective unless it is here."""
        lot = self._lot
        if lot is None or not lot.has(original, full.dtype):
            self.clear()
            lot = self._gather(self._bucket_of[original.name], full.dtype)
        spread(lot.shards[original.name], full, original.layout)

    def _gather(self, bucket: Bucket, dtype: torch.dtype) -> Lot:
        shards = [member.parameter.detach() for member in bucket.members]
        rows = self._channel.rows(bucket, bucket.join(shard.to(dtype) for shard in shards))
        names = [member.name for member in bucket.members]
        parts = torch.split(rows, bucket.lengths, dim=1)
        versions = (shard._version for shard in shards)
        lot = Lot(dtype, dict(zip(names, parts, strict=True)), dict(zip(names, versions, strict=True)))
        if len(names) > 1:
            self._lot = lot
            self._count(rows.nbytes)
        return lot

    def clear(self) -> None:
        """Forget what is here."""
        self._lot = None
        self._count(0)
