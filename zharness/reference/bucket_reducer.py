"""Reduce buckets of gradients at stage 2 while backward runs, in the same order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from zharness.reference.buckets import Bucket
from zharness.reference.torch_func.torch_fallback import EndOfBackward


class BucketReducer:
    """Reduces buckets of gradients in rounds while backward computes the gradients.

    A round reduces the buckets in order: each bucket as soon as all its gradients are computed and all earlier buckets
    are reduced, and the remaining buckets at the end of autograd's graph task. ``reduce(bucket, has_more)`` is a
    collective. In it the ranks exchange which gradients of the bucket they have, and whether they have gradients in
    later buckets; it returns True if any rank has either. So two ranks reduce a bucket in the same collective even if
    only one rank completes the bucket early, and all ranks end the round together, when no rank has gradients left.

    A gradient that is computed after its bucket was reduced stays in ``parameter.grad`` until the end of the outer
    graph task, the next round or the accumulation boundary. All ranks have to run the same number of backwards, but
    these may use different parameters.
    """

    def __init__(self, buckets: Sequence[Bucket], reduce: Callable[[Bucket, bool], bool]) -> None:
        self._buckets = buckets
        self._reduce = reduce
        self._bucket_indices = {m.parameter: index for index, bucket in enumerate(buckets) for m in bucket.members}
        self._end_of_backward = EndOfBackward(self._bucket_indices, self._reduce_remaining_buckets)
        self.reset()

    def on_grad_ready(self, parameter: nn.Parameter) -> None:
        """Record that ``parameter.grad`` was computed, and reduce the buckets that are complete now.

        This is a collective. A hook on the parameter calls this method.
        """
        if parameter not in self._pending_params:
            self._pending_params.add(parameter)
            self._missing_counts[self._bucket_indices[parameter]] -= 1
        self._end_of_backward.on_grad_ready(parameter)
        while self._next_bucket < len(self._buckets) and not self._missing_counts[self._next_bucket]:
            self._reduce_next_bucket()

    def reset(self) -> None:
        """Discard the records of pending gradients, and begin a new round."""
        self._next_bucket = 0
        self._pending_params: set[nn.Parameter] = set()
        self._missing_counts = [len(bucket.members) for bucket in self._buckets]
        self._end_of_backward.reset()

    def _reduce_next_bucket(self) -> bool:
        """Reduce the next bucket (a collective); return whether any rank has gradients in this or a later bucket."""
        bucket = self._buckets[self._next_bucket]
        self._pending_params.difference_update(param.parameter for param in bucket.members)
        self._missing_counts[self._next_bucket] = len(bucket.members)
        self._next_bucket += 1
        return self._reduce(bucket, bool(self._pending_params))

    def _reduce_remaining_buckets(self) -> None:
        """End the round: reduce buckets until no rank has gradients left, then begin again with the first bucket."""
        while self._next_bucket < len(self._buckets) and self._reduce_next_bucket():
            pass
        self._next_bucket = 0
