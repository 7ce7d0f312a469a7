"""Prefetch at stage 3: all-gather a parameter together with the parameters that will be read next.

A module reads its parameters one by one, and one collective for each would take more time than the model's computation.
Each read copies its parameter from the current ``PrefetchedBucket``. That bucket is freed at the next collective and at
the end of a forward or backward.

The buckets are learned from the order of the reads: when the parameter that began an earlier sequence of reads is read
again, that whole sequence is gathered at once. A parameter that has not begun a sequence is gathered with the bucket
that ``assign_buckets`` assigned it to, which has its neighbours in the model. If at most half of that bucket is used,
its parameters are gathered alone from then on. The ranks read in the same order, so they gather the same buckets.
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
from zharness.reference.torch_func import torch_fallback


@dataclass(frozen=True)
class PrefetchedBucket:
    """An all-gathered bucket: each member's shards by name, shape (N, k), and the version of this rank's shard."""

    bucket: Bucket
    dtype: torch.dtype
    shards: Mapping[str, Tensor]
    shard_versions: Mapping[str, int]
    used_names: set[str] = field(default_factory=set)

    def contains(self, param: ModelParam, dtype: torch.dtype) -> bool:
        """Return whether the bucket has the parameter's current version in ``dtype``."""
        return dtype == self.dtype and self.shard_versions.get(param.name) == param.parameter._version

    def is_mostly_unused(self) -> bool:
        """Return whether at most half of the bucket's elements were read."""
        return 2 * self.bucket.select(self.used_names).numel <= self.bucket.numel


@dataclass
class ReadSequence:
    """Parameters that were read one after the other in one dtype.

    ``first_read`` has the name of the first parameter, and True if that parameter was read in a backward.
    """

    first_read: tuple[str, bool]
    dtype: torch.dtype
    members: dict[str, ModelParam] = field(default_factory=dict)
    elements: int = 0

    def can_add(self, param: ModelParam, dtype: torch.dtype, max_elements: int) -> bool:
        """Return whether the sequence stays in one dtype and within ``max_elements`` with this parameter."""
        more = 0 if param.name in self.members else param.layout.numel
        return dtype == self.dtype and self.elements + more <= max_elements

    def add(self, param: ModelParam) -> None:
        """Append the parameter to the sequence, unless the sequence already contains it."""
        if param.name not in self.members:
            self.members[param.name] = param
            self.elements += param.layout.numel


class Prefetcher:
    """Keeps one prefetched bucket of at most ``max_elements``, and passes its size in bytes to ``report_bytes``."""

    def __init__(
        self,
        buckets: Iterable[Bucket],
        max_elements: int,
        collectives: ShardCollectives,
        report_bytes: Callable[[int], None],
    ) -> None:
        self._bucket_of = {param.name: bucket for bucket in buckets for param in bucket.members}
        self._max_elements = max_elements
        self._collectives = collectives
        self._report_bytes = report_bytes
        self._current_bucket: PrefetchedBucket | None = None
        self._current_sequence: ReadSequence | None = None
        self._learned_buckets: dict[tuple[str, bool], Bucket] = {}

    def fetch_into(self, param: ModelParam, full: Tensor) -> None:
        """Fill ``full`` with the parameter, which is cast to the dtype of ``full`` before it is sent.

        This is a collective unless the parameter was prefetched.
        """
        read = (param.name, _is_in_backward())
        self._record_read(read, param, full.dtype)
        current = self._current_bucket
        if current is None or not current.contains(param, full.dtype):
            self._drop_bucket()
            current = self._all_gather_bucket(self._learned_buckets.get(read, self._bucket_of[param.name]), full.dtype)
        current.used_names.add(param.name)
        copy_shards_to_full(current.shards[param.name], full, param.layout)

    def _record_read(self, read: tuple[str, bool], param: ModelParam, dtype: torch.dtype) -> None:
        """Append the parameter to the current sequence, or begin another sequence with ``read``."""
        if self._current_sequence is None or not self._current_sequence.can_add(param, dtype, self._max_elements):
            self._learn_sequence()
            self._current_sequence = ReadSequence(read, dtype)
        self._current_sequence.add(param)

    def _learn_sequence(self) -> None:
        """End the current sequence, and record it as the bucket to gather at the next read of its first parameter."""
        sequence, self._current_sequence = self._current_sequence, None
        if sequence is not None:
            self._learned_buckets[sequence.first_read] = Bucket(tuple(sequence.members.values()))

    def _all_gather_bucket(self, bucket: Bucket, dtype: torch.dtype) -> PrefetchedBucket:
        """All-gather the bucket, and keep it as the current one if it has several members. This is a collective."""
        shards = [member.parameter.detach() for member in bucket.members]
        rows = self._collectives.all_gather_bucket(bucket, bucket.pack_shards(shard.to(dtype) for shard in shards))
        names = [member.name for member in bucket.members]
        parts = dict(zip(names, torch.split(rows, bucket.shard_lengths, dim=1), strict=True))
        versions = dict(zip(names, (shard._version for shard in shards), strict=True))
        prefetched = PrefetchedBucket(bucket, dtype, parts, versions)
        if len(names) > 1:
            self._current_bucket = prefetched
            self._report_bytes(rows.nbytes)
        return prefetched

    def _drop_bucket(self) -> None:
        """Free the current bucket; if it was mostly unused, its parameters are gathered alone from now on."""
        if self._current_bucket is not None and self._current_bucket.is_mostly_unused():
            self._bucket_of.update({member.name: Bucket((member,)) for member in self._current_bucket.bucket.members})
        self._current_bucket = None
        self._report_bytes(0)

    def clear(self) -> None:
        """Free the current bucket and end the current sequence of reads."""
        self._learn_sequence()
        self._drop_bucket()

    def clear_after_forward(self) -> None:
        """Call ``clear`` now, or after the running backward if the forward was a recomputation in that backward."""
        if not (_is_in_backward() and torch_fallback.call_after_backward(self.clear)):
            self.clear()


def _is_in_backward() -> bool:
    """Return whether a backward runs on this thread."""
    return private.current_graph_task_id() != -1
