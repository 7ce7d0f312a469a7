"""The parameters that were gathered last, at stage 3.

A module reads its parameters one by one, and a collective for each would cost more than the model does. So what is read
is gathered with those for which the next reads ask. Each read copies its parameter off the shelf; the next collective,
the end of a forward and that of a backward empty it.

Which those are the reads tell: when the first parameter of an earlier run of reads is read again, all of that run is
gathered. A parameter that has not begun a run comes with its bucket, its neighbours in the model; and alone, once half
of such a bucket was brought in vain. All of this follows from the order of the reads, in which the ranks agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zharness.reference import torch_private as private
from zharness.reference.buckets import Bucket, spread
from zharness.reference.layout import Original
from zharness.reference.uneven import Channel


@dataclass(frozen=True)
class Lot:
    """A gathered bucket: each member's shards by name, shape (N, k), and the version of the shard that was sent."""

    bucket: Bucket
    dtype: torch.dtype
    shards: Mapping[str, Tensor]
    versions: Mapping[str, int]
    read: set[str] = field(default_factory=set)

    def has(self, original: Original, dtype: torch.dtype) -> bool:
        """Whether the parameter is here, in that dtype and as it is now."""
        return dtype == self.dtype and self.versions.get(original.name) == original.parameter._version

    def wasted(self) -> bool:
        """Whether no more was read than was brought in vain."""
        return 2 * self.bucket.only(self.read).elements <= self.bucket.elements


@dataclass
class Run:
    """Parameters that were read one after the other in one dtype, after the first of them, forward or backward."""

    begin: tuple[str, bool]
    dtype: torch.dtype
    members: dict[str, Original] = field(default_factory=dict)
    elements: int = 0

    def takes(self, original: Original, dtype: torch.dtype, room: int) -> bool:
        """Whether the parameter may join, so that they are at most ``room`` elements together."""
        more = 0 if original.name in self.members else original.layout.numel
        return dtype == self.dtype and self.elements + more <= room

    def add(self, original: Original) -> None:
        if original.name not in self.members:
            self.members[original.name] = original
            self.elements += original.layout.numel


class Shelf:
    """Room for one Lot of ``room`` elements. ``count`` is told of the bytes on it whenever they change."""

    def __init__(self, buckets: Iterable[Bucket], room: int, channel: Channel, count: Callable[[int], None]) -> None:
        self._bucket_of = {original.name: bucket for bucket in buckets for original in bucket.members}
        self._room = room
        self._channel = channel
        self._count = count
        self._lot: Lot | None = None
        self._run: Run | None = None
        self._learnt: dict[tuple[str, bool], Bucket] = {}

    def fetch(self, original: Original, full: Tensor) -> None:
        """Fill ``full`` with the parameter, cast to its dtype before it is sent. Collective unless it is here."""
        begin = (original.name, _in_backward())
        self._follow(begin, original, full.dtype)
        lot = self._lot
        if lot is None or not lot.has(original, full.dtype):
            self._empty()
            lot = self._gather(self._learnt.get(begin, self._bucket_of[original.name]), full.dtype)
        lot.read.add(original.name)
        spread(lot.shards[original.name], full, original.layout)

    def _follow(self, begin: tuple[str, bool], original: Original, dtype: torch.dtype) -> None:
        if self._run is None or not self._run.takes(original, dtype, self._room):
            self._learn()
            self._run = Run(begin, dtype)
        self._run.add(original)

    def _learn(self) -> None:
        if self._run is not None:
            self._learnt[self._run.begin] = Bucket(tuple(self._run.members.values()))
            self._run = None

    def _gather(self, bucket: Bucket, dtype: torch.dtype) -> Lot:
        shards = [member.parameter.detach() for member in bucket.members]
        rows = self._channel.rows(bucket, bucket.join(shard.to(dtype) for shard in shards))
        names = [member.name for member in bucket.members]
        parts = torch.split(rows, bucket.lengths, dim=1)
        versions = (shard._version for shard in shards)
        lot = Lot(bucket, dtype, dict(zip(names, parts, strict=True)), dict(zip(names, versions, strict=True)))
        if len(names) > 1:
            self._lot = lot
            self._count(rows.nbytes)
        return lot

    def _empty(self) -> None:
        if self._lot is not None and self._lot.wasted():
            self._bucket_of.update({member.name: Bucket((member,)) for member in self._lot.bucket.members})
        self._lot = None
        self._count(0)

    def clear(self) -> None:
        """Forget what is here: the reads that follow are others."""
        self._learn()
        self._empty()

    def clear_after_forward(self) -> None:
        """``clear``, now; or, where that forward was recomputed for a backward, once that is over."""
        if _in_backward() and private.can_queue():
            private.at_end_of_backward(self.clear)
        else:
            self.clear()


def _in_backward() -> bool:
    return private.graph_task() != -1
