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

from zharness import torch_private as private
from zharness.reference.buckets import Bucket, copy_shards_to_full
from zharness.reference.collectives import ShardCollectives
from zharness.reference.layout import ModelParam


@dataclass(frozen=True)
class PrefetchedBucket:
    """A gathered bucket: each member's shards by name, shape (N, k), and the version of the shard that was sent."""

    bucket: Bucket
    dtype: torch.dtype
    shards: Mapping[str, Tensor]
    shard_versions: Mapping[str, int]
    used_names: set[str] = field(default_factory=set)

    def contains(self, param: ModelParam, dtype: torch.dtype) -> bool:
        """Whether the parameter is here, in that dtype and as it is now."""
        return dtype == self.dtype and self.shard_versions.get(param.name) == param.parameter._version

    def is_mostly_unused(self) -> bool:
        """Whether no more was read than was brought in vain."""
        return 2 * self.bucket.select(self.used_names).numel <= self.bucket.numel


@dataclass
class ReadSequence:
    """Parameters that were read one after the other in one dtype, after the first of them, forward or backward."""

    first_read: tuple[str, bool]
    dtype: torch.dtype
    members: dict[str, ModelParam] = field(default_factory=dict)
    elements: int = 0

    def can_add(self, param: ModelParam, dtype: torch.dtype, max_elements: int) -> bool:
        """Whether the parameter may join, so that they are at most ``room`` elements together."""
        more = 0 if param.name in self.members else param.layout.numel
        return dtype == self.dtype and self.elements + more <= max_elements

    def add(self, param: ModelParam) -> None:
        if param.name not in self.members:
            self.members[param.name] = param
            self.elements += param.layout.numel


class Prefetcher:
    """Room for one Lot of ``room`` elements. ``count`` is told of the bytes on it whenever they change."""

    def __init__(
        self,
        buckets: Iterable[Bucket],
        max_elements: int,
        collectives: ShardCollectives,
        report_bytes: Callable[[int], None],
    ) -> None:
        self._bucket_of = {original.name: bucket for bucket in buckets for original in bucket.members}
        self._max_elements = max_elements
        self._collectives = collectives
        self._report_bytes = report_bytes
        self._current_bucket: PrefetchedBucket | None = None
        self._current_sequence: ReadSequence | None = None
        self._learned_buckets: dict[tuple[str, bool], Bucket] = {}

    def fetch_into(self, param: ModelParam, full: Tensor) -> None:
        """Fill ``full`` with the parameter, cast to its dtype before it is sent. Collective unless it is here."""
        begin = (param.name, _is_in_backward())
        self._record_read(begin, param, full.dtype)
        lot = self._current_bucket
        if lot is None or not lot.contains(param, full.dtype):
            self._drop_bucket()
            lot = self._all_gather_bucket(self._learned_buckets.get(begin, self._bucket_of[param.name]), full.dtype)
        lot.used_names.add(param.name)
        copy_shards_to_full(lot.shards[param.name], full, param.layout)

    def _record_read(self, first_read: tuple[str, bool], param: ModelParam, dtype: torch.dtype) -> None:
        if self._current_sequence is None or not self._current_sequence.can_add(param, dtype, self._max_elements):
            self._learn_sequence()
            self._current_sequence = ReadSequence(first_read, dtype)
        self._current_sequence.add(param)

    def _learn_sequence(self) -> None:
        if self._current_sequence is not None:
            self._learned_buckets[self._current_sequence.first_read] = Bucket(
                tuple(self._current_sequence.members.values())
            )
            self._current_sequence = None

    def _all_gather_bucket(self, bucket: Bucket, dtype: torch.dtype) -> PrefetchedBucket:
        shards = [member.parameter.detach() for member in bucket.members]
        rows = self._collectives.all_gather_bucket(bucket, bucket.pack_shards(shard.to(dtype) for shard in shards))
        names = [member.name for member in bucket.members]
        parts = torch.split(rows, bucket.shard_lengths, dim=1)
        versions = (shard._version for shard in shards)
        lot = PrefetchedBucket(
            bucket, dtype, dict(zip(names, parts, strict=True)), dict(zip(names, versions, strict=True))
        )
        if len(names) > 1:
            self._current_bucket = lot
            self._report_bytes(rows.nbytes)
        return lot

    def _drop_bucket(self) -> None:
        if self._current_bucket is not None and self._current_bucket.is_mostly_unused():
            self._bucket_of.update({member.name: Bucket((member,)) for member in self._current_bucket.bucket.members})
        self._current_bucket = None
        self._report_bytes(0)

    def clear(self) -> None:
        """Forget what is here: the reads that follow are others."""
        self._learn_sequence()
        self._drop_bucket()

    def clear_after_forward(self) -> None:
        """``clear``, now; or, where that forward was recomputed for a backward, once that is over."""
        if _is_in_backward() and private.can_queue_callback():
            private.queue_backward_callback(self.clear)
        else:
            self.clear()


def _is_in_backward() -> bool:
    return private.current_graph_task_id() != -1
