"""Stage 2: buckets of gradients are reduced while backward runs, in one order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from zharness.reference.buckets import Bucket
from zharness.reference.torch_fallback import EndOfBackward


class BucketReducer:
    """Says when to reduce which bucket, while gradients come.

    In a round the buckets are reduced from the first to the last: each as soon as all its gradients have come and all
    buckets before it are done, the rest when autograd's run is over. ``reduce(bucket, more)`` is a collective in which
    the ranks tell which gradients of the bucket they have and whether they have ``more`` in later ones; it is true
    where any rank has any of either. So what one rank completes early and another only at the end is the same
    collective on both, and the round ends on all ranks together, when none has anything left. A gradient that comes
    after its bucket waits in ``parameter.grad``: for the end of an outer run, the next round, or the boundary.

    All that is asked of the ranks is that each runs the same backwards; which parameters they use may differ.
    """

    def __init__(self, buckets: Sequence[Bucket], reduce: Callable[[Bucket, bool], bool]) -> None:
        self._buckets = buckets
        self._reduce = reduce
        self._bucket_indices = {o.parameter: at for at, bucket in enumerate(buckets) for o in bucket.members}
        self._end_of_backward = EndOfBackward(self._bucket_indices, self._reduce_remaining_buckets)
        self.reset()

    def on_grad_ready(self, parameter: nn.Parameter) -> None:
        """To be called by the parameter's own hook, with its gradient in ``parameter.grad``. Collective."""
        if parameter not in self._pending_params:
            self._pending_params.add(parameter)
            self._missing_counts[self._bucket_indices[parameter]] -= 1
        self._end_of_backward.on_grad_ready(parameter)
        while self._next_bucket < len(self._buckets) and not self._missing_counts[self._next_bucket]:
            self._reduce_next_bucket()

    def reset(self) -> None:
        """No gradient waits, and no round is running."""
        self._next_bucket = 0
        self._pending_params: set[nn.Parameter] = set()
        self._missing_counts = [len(bucket.members) for bucket in self._buckets]
        self._end_of_backward.reset()

    def _reduce_next_bucket(self) -> bool:
        bucket = self._buckets[self._next_bucket]
        self._pending_params.difference_update(original.parameter for original in bucket.members)
        self._missing_counts[self._next_bucket] = len(bucket.members)
        self._next_bucket += 1
        return self._reduce(bucket, bool(self._pending_params))

    def _reduce_remaining_buckets(self) -> None:
        while self._next_bucket < len(self._buckets) and self._reduce_next_bucket():
            pass
        self._next_bucket = 0
