"""Run the collectives of stage 3 on sharded parameters.

All ranks run the same collectives in the same order. The package ``uneven_ranks`` handles ranks that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from zharness.comm import Comm
from zharness.reference.buckets import Bucket
from zharness.reference.layout import ModelParam, all_gather_full_tensor, all_gather_rows
from zharness.reference.uneven_ranks.collective_order import CollectiveOrder
from zharness.reference.uneven_ranks.negotiation import (
    ALL_DTYPES,
    CollectiveMode,
    CollectiveNegotiation,
    CollectiveRequest,
    RequestKind,
)


class ShardCollectives:
    """The collectives on sharded parameters. ``model_params`` has the same order on all ranks.

    Inside ``allow_uneven_ranks`` each of them becomes a round of the negotiation.
    """

    def __init__(self, model_params: Sequence[ModelParam], comm: Comm, divisor: int) -> None:
        self._model_params = model_params
        self._comm = comm
        self._divisor = divisor
        self._param_indices = {param.name: index for index, param in enumerate(model_params)}
        self._negotiation = CollectiveNegotiation(model_params, comm, self._run_collective)
        self._order = CollectiveOrder(comm)

    def all_gather_bucket(self, bucket: Bucket, row: Tensor) -> Tensor:
        """All-gather every rank's ``row`` of the bucket: shape (N, length of a row). This is a collective."""
        self._record_collective(RequestKind.ALL_GATHER_PARAM, bucket.members, row.dtype)
        return all_gather_rows(row, self._comm)

    def all_gather_param(self, param: ModelParam, dtype: torch.dtype) -> Tensor:
        """All-gather the full parameter, cast to ``dtype`` before it is sent. This is a collective."""
        return self._run_or_negotiate(RequestKind.ALL_GATHER_PARAM, param, param.parameter.detach().to(dtype))

    def all_gather_grad(self, param: ModelParam, shard: Tensor) -> Tensor:
        """All-gather the full tensor from every rank's ``shard``, and divide the full tensor. This is a collective.

        This is the adjoint of ``reduce_grad``, used when a backward is differentiated again.
        """
        full = self._run_or_negotiate(RequestKind.ALL_GATHER_GRAD, param, shard)
        return full / (self._remaining_divisor(param) * param.predivide_factor)

    def reduce_grad(self, param: ModelParam, full: Tensor) -> Tensor:
        """Reduce-scatter ``full`` to this rank's shard of the mean, in the reduce dtype. This is a collective."""
        return self._run_or_negotiate(RequestKind.REDUCE_GRAD, param, param.cast_for_reduce(full))

    def reduce_grads(self, params: Sequence[ModelParam], full_grads: Sequence[Tensor]) -> list[Tensor]:
        """Run ``reduce_grad`` for parameters of the same dtypes, in one collective unless ranks are uneven."""
        if not self.is_even or not params:
            return [self.reduce_grad(param, full) for param, full in zip(params, full_grads, strict=True)]
        bucket, dtypes = Bucket(tuple(params)), params[0].dtypes
        self._record_collective(RequestKind.REDUCE_GRAD, params, dtypes.reduce_dtype)
        row = bucket.reduce_scatter(
            [param.cast_for_reduce(full) for param, full in zip(params, full_grads, strict=True)], self._comm
        )
        mean = row.to(dtypes.param_dtype) / self._remaining_divisor(params[0])
        return list(torch.split(mean, bucket.shard_lengths))

    @property
    def is_even(self) -> bool:
        """True if all ranks now run the same collectives, False inside ``allow_uneven_ranks``."""
        return self._negotiation.mode is CollectiveMode.DIRECT

    @property
    def remote_grad_callbacks(self) -> list[Callable[[ModelParam, Tensor], None]]:
        """The functions that receive this rank's share of a mean gradient to which only other ranks contributed."""
        return self._negotiation.remote_grad_callbacks

    def allow_uneven_ranks(self) -> AbstractContextManager[None]:
        """Let ranks run different collectives inside the block. The end of the block is a collective."""
        return self._negotiation.allow_uneven_ranks()

    def require_even(self, operation: str) -> None:
        """Raise UsageError inside ``engine.uneven()``, where ``operation`` is not available."""
        self._negotiation.require_even(operation)

    def check_same_collectives(self) -> None:
        """Raise UsageError on every rank if collectives differed between ranks since the last check (a collective)."""
        self._order.check_same_on_all_ranks(self._model_params[0].parameter.device)

    def _remaining_divisor(self, param: ModelParam) -> float:
        """Return the divisor that makes the reduced sum the mean. It is 1 for a parameter with a master weight.

        Autograd rounds a gradient to its parameter's dtype, so ``Gradients`` divides that sum in the master's dtype.
        """
        return 1 if param.has_master else self._divisor / param.predivide_factor

    def _run_or_negotiate(self, kind: RequestKind, param: ModelParam, local_tensor: Tensor) -> Tensor:
        """Run a collective immediately, or in a negotiated round inside ``allow_uneven_ranks``."""
        request = CollectiveRequest(kind, self._param_indices[param.name], ALL_DTYPES.index(local_tensor.dtype))
        if not self.is_even:
            return self._negotiation.run_round(request, local_tensor)[request]
        self._record_collective(kind, [param], local_tensor.dtype)
        return self._run_collective(request, local_tensor)

    def _record_collective(self, kind: RequestKind, params: Sequence[ModelParam], dtype: torch.dtype) -> None:
        """Add a collective to the checksum that ``check_same_collectives`` compares between ranks."""
        self._order.record(int(kind), [self._param_indices[param.name] for param in params], dtype)

    def _run_collective(self, request: CollectiveRequest, local_tensor: Tensor) -> Tensor:
        """All-gather the shards, or reduce-scatter the full gradients to the shard of the mean."""
        param = self._model_params[request.param_index]
        if request.kind is not RequestKind.REDUCE_GRAD:
            return all_gather_full_tensor(local_tensor, param.layout, self._comm)
        shard = Bucket((param,)).reduce_scatter([local_tensor], self._comm).to(param.dtypes.param_dtype)
        return shard / self._remaining_divisor(param)
