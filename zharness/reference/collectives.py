"""Run the collectives of stage 3 on sharded parameters.

All ranks run the same collectives in the same order. The package ``uneven_ranks`` implements ``RankAgreement``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from zharness.comm import Comm
from zharness.reference.buckets import Bucket
from zharness.reference.layout import ModelParam, all_gather_full_tensor, all_gather_rows


class CollectiveKind(IntEnum):
    """The kinds of collectives on sharded parameters."""

    ALL_GATHER_PARAM = 1
    ALL_GATHER_GRAD = 2
    REDUCE_GRAD = 3


RunCollective = Callable[[CollectiveKind, ModelParam, Tensor], Tensor]


class RankAgreement(Protocol):
    """Detects that ranks run different collectives, and permits this inside ``allow_uneven_ranks``."""

    # Called with this rank's share of a mean gradient to which only other ranks contributed.
    remote_grad_callbacks: list[Callable[[ModelParam, Tensor], None]]

    @property
    def is_even(self) -> bool:
        """True if all ranks now run the same collectives, False inside ``allow_uneven_ranks``."""

    def record(self, kind: CollectiveKind, params: Sequence[ModelParam], dtype: torch.dtype) -> None:
        """Record a collective that this rank is about to run."""

    def check_same_collectives(self) -> None:
        """Raise UsageError on every rank if the ranks recorded different collectives since the last check."""

    def allow_uneven_ranks(self, run: RunCollective) -> AbstractContextManager[None]:
        """Let ranks request different collectives inside the block. The end of the block is a collective."""

    def run_requested(self, kind: CollectiveKind, param: ModelParam, local_tensor: Tensor) -> Tensor:
        """Run one round of the collectives that ranks request, and return the result of this rank's request."""

    def require_even(self, operation: str) -> None:
        """Raise UsageError inside ``allow_uneven_ranks``, where ``operation`` is not available."""


class ShardCollectives:
    """The collectives on sharded parameters."""

    def __init__(self, comm: Comm, divisor: int, agreement: RankAgreement) -> None:
        self.agreement = agreement
        self._comm = comm
        self._divisor = divisor

    def all_gather_bucket(self, bucket: Bucket, row: Tensor) -> Tensor:
        """All-gather every rank's ``row`` of the bucket to shape (N, length of a row). This is a collective."""
        self.agreement.record(CollectiveKind.ALL_GATHER_PARAM, bucket.members, row.dtype)
        return all_gather_rows(row, self._comm)

    def all_gather_param(self, param: ModelParam, dtype: torch.dtype) -> Tensor:
        """All-gather the full parameter, cast to ``dtype`` before it is sent. This is a collective."""
        return self._run(CollectiveKind.ALL_GATHER_PARAM, param, param.parameter.detach().to(dtype))

    def all_gather_grad(self, param: ModelParam, shard: Tensor) -> Tensor:
        """All-gather every rank's ``shard``, and divide the result as ``reduce_grad`` does. This is a collective.

        This is the adjoint of ``reduce_grad``, for a backward that is differentiated again.
        """
        full = self._run(CollectiveKind.ALL_GATHER_GRAD, param, shard)
        return full / (self._remaining_divisor(param) * param.predivide_factor)

    def reduce_grad(self, param: ModelParam, full: Tensor) -> Tensor:
        """Reduce-scatter ``full`` to this rank's shard of the mean, in the reduce dtype. This is a collective."""
        return self._run(CollectiveKind.REDUCE_GRAD, param, param.cast_for_reduce(full))

    def reduce_grads(self, params: Sequence[ModelParam], full_grads: Sequence[Tensor]) -> list[Tensor]:
        """Run ``reduce_grad`` for parameters of the same dtypes, in one collective outside ``allow_uneven_ranks``."""
        if not self.agreement.is_even or not params:
            return [self.reduce_grad(param, full) for param, full in zip(params, full_grads, strict=True)]
        bucket, dtypes = Bucket(tuple(params)), params[0].dtypes
        self.agreement.record(CollectiveKind.REDUCE_GRAD, params, dtypes.reduce_dtype)
        row = bucket.reduce_scatter(
            [param.cast_for_reduce(full) for param, full in zip(params, full_grads, strict=True)], self._comm
        )
        mean = row.to(dtypes.param_dtype) / self._remaining_divisor(params[0])
        return list(torch.split(mean, bucket.shard_lengths))

    def allow_uneven_ranks(self) -> AbstractContextManager[None]:
        """Let ranks run different collectives inside the block. The end of the block is a collective."""
        return self.agreement.allow_uneven_ranks(self._run_now)

    def _remaining_divisor(self, param: ModelParam) -> float:
        """Return the divisor that turns the reduced sum into the mean, or 1 for a parameter with a master weight.

        Autograd rounds a gradient to its parameter's dtype, so ``Gradients`` divides the sum for a master weight later,
        in the master weight's dtype.
        """
        return 1 if param.has_master else self._divisor / param.predivide_factor

    def _run(self, kind: CollectiveKind, param: ModelParam, local_tensor: Tensor) -> Tensor:
        """Run a collective at once, or inside ``allow_uneven_ranks`` in a round with the requests of other ranks."""
        if not self.agreement.is_even:
            return self.agreement.run_requested(kind, param, local_tensor)
        self.agreement.record(kind, [param], local_tensor.dtype)
        return self._run_now(kind, param, local_tensor)

    def _run_now(self, kind: CollectiveKind, param: ModelParam, local_tensor: Tensor) -> Tensor:
        """Run one collective: all-gather shards, or reduce-scatter full gradients to this rank's shard of the mean."""
        if kind is not CollectiveKind.REDUCE_GRAD:
            return all_gather_full_tensor(local_tensor, param.layout, self._comm)
        shard = Bucket((param,)).reduce_scatter([local_tensor], self._comm).to(param.dtypes.param_dtype)
        return shard / self._remaining_divisor(param)
