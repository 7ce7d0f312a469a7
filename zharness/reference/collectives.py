"""The collectives of stage 3 on sharded parameters, and the coalesced collectives on many tensors at once.

All ranks run the same collectives in the same order. ``uneven_ranks`` handles ranks that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor

from zharness.comm import Comm
from zharness.reference.buckets import DEFAULT_BUCKET_SIZE, Bucket
from zharness.reference.layout import ModelParam, ShardLayout, all_gather_full_tensor, all_gather_rows, pad_flat
from zharness.reference.uneven_ranks.collective_order import CollectiveOrder
from zharness.reference.uneven_ranks.negotiation import (
    ALL_DTYPES,
    CollectiveMode,
    CollectiveNegotiation,
    CollectiveRequest,
    RequestKind,
)

K = TypeVar("K")


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
        """All-gather every rank's ``row`` of the bucket: shape (N, length of a row). Collective."""
        self._record_collective(RequestKind.ALL_GATHER_PARAM, bucket.members, row.dtype)
        return all_gather_rows(row, self._comm)

    def all_gather_param(self, param: ModelParam, dtype: torch.dtype) -> Tensor:
        """All-gather the full parameter, cast to ``dtype`` before it is sent. Collective."""
        return self._run_or_negotiate(RequestKind.ALL_GATHER_PARAM, param, param.parameter.detach().to(dtype))

    def all_gather_grad(self, param: ModelParam, shard: Tensor) -> Tensor:
        """All-gather the full tensor from every rank's ``shard`` and divide it: the adjoint of ``reduce_grad``.

        Collective.
        """
        full = self._run_or_negotiate(RequestKind.ALL_GATHER_GRAD, param, shard)
        return full / (self._remaining_divisor(param) * param.predivide_factor)

    def reduce_grad(self, param: ModelParam, full: Tensor) -> Tensor:
        """Reduce-scatter ``full`` to this rank's shard of the mean, summed in the reduce dtype. Collective."""
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
        """Whether all ranks run the same collectives now: False inside ``allow_uneven_ranks``."""
        return self._negotiation.mode is CollectiveMode.DIRECT

    @property
    def remote_grad_callbacks(self) -> list[Callable[[ModelParam, Tensor], None]]:
        """Callbacks that receive this rank's share of a mean gradient that only other ranks contributed to."""
        return self._negotiation.remote_grad_callbacks

    def allow_uneven_ranks(self) -> AbstractContextManager[None]:
        """Let ranks run different collectives inside the block. Collective at its end."""
        return self._negotiation.allow_uneven_ranks()

    def require_even(self, operation: str) -> None:
        """Raise UsageError inside ``uneven``, where ``operation`` is not available."""
        self._negotiation.require_even(operation)

    def check_same_collectives(self) -> None:
        """Raise UsageError on every rank if the ranks ran different collectives since the last check. Collective."""
        self._order.check_same_on_all_ranks(self._model_params[0].parameter.device)

    def _remaining_divisor(self, param: ModelParam) -> float:
        """What is left to divide the sum by. It is 1 if the optimizer's dtype is wider than the parameter's.

        Autograd rounds a gradient to its parameter's dtype, so ``Gradients`` divides then, in the wider dtype.
        """
        return 1 if param.has_master else self._divisor / param.predivide_factor

    def _run_or_negotiate(self, kind: RequestKind, param: ModelParam, local_tensor: Tensor) -> Tensor:
        request = CollectiveRequest(kind, self._param_indices[param.name], ALL_DTYPES.index(local_tensor.dtype))
        if not self.is_even:
            return self._negotiation.run_round(request, local_tensor)[request]
        self._record_collective(kind, [param], local_tensor.dtype)
        return self._run_collective(request, local_tensor)

    def _record_collective(self, kind: RequestKind, params: Sequence[ModelParam], dtype: torch.dtype) -> None:
        self._order.record(int(kind), [self._param_indices[param.name] for param in params], dtype)

    def _run_collective(self, request: CollectiveRequest, local_tensor: Tensor) -> Tensor:
        """All-gather the shards, or reduce-scatter the full gradients to the shard of the mean. Collective."""
        param = self._model_params[request.param_index]
        if request.kind is not RequestKind.REDUCE_GRAD:
            return all_gather_full_tensor(local_tensor, param.layout, self._comm)
        shard = Bucket((param,)).reduce_scatter([local_tensor], self._comm).to(param.dtypes.param_dtype)
        return shard / self._remaining_divisor(param)


@torch.no_grad()
def all_gather_full_tensors(shards: Mapping[K, tuple[Tensor, ShardLayout]], comm: Comm) -> dict[K, Tensor]:
    """All-gather many full tensors to the CPU, in the order of ``shards``, from every rank's shard (padded or not).

    Collective: ``shards`` has the same keys in the same order on every rank.
    """
    full: dict[K, Tensor] = {}
    # The padded lengths are the same on all ranks; the last ranks own fewer elements.
    lengths = {key: layout.shard_length for key, (_, layout) in shards.items()}
    for keys in _coalesce_keys(
        {key: shard for key, (shard, _) in shards.items()}, lengths, DEFAULT_BUCKET_SIZE // comm.world_size
    ):
        rows = all_gather_rows(torch.cat([pad_flat(shards[key][0], lengths[key]) for key in keys]), comm)
        for key, part in zip(keys, torch.split(rows, [lengths[key] for key in keys], dim=1), strict=True):
            layout = shards[key][1]
            whole = part.reshape(-1)[: layout.numel].view(layout.shape)
            # Without memory_format a part one element wide, a column of the rows, would keep the rows' stride.
            full[key] = whole.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return {key: full[key] for key in shards}


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], comm: Comm, source: int = 0) -> None:
    """Copy each tensor of rank ``source`` to all ranks, in place. Collective."""
    by_index = dict(enumerate(tensors))
    lengths = {key: tensor.numel() for key, tensor in by_index.items()}
    for keys in _coalesce_keys(by_index, lengths, DEFAULT_BUCKET_SIZE):
        # Copy even a single tensor: gloo releases what it sent a moment later, and a borrowed tensor would be counted
        # as unsharded memory until then.
        flat = torch.cat([by_index[key].detach().reshape(-1) for key in keys])
        if flat.numel():
            comm.broadcast(flat, source)
        for key, part in zip(keys, torch.split(flat, [lengths[key] for key in keys]), strict=True):
            by_index[key].copy_(part.view(by_index[key].shape))


def _coalesce_keys(tensors: Mapping[K, Tensor], lengths: Mapping[K, int], max_elements: int) -> Iterator[list[K]]:
    """Group the keys of tensors for one collective each: of one dtype and device, with at most ``max_elements``.

    A tensor with more elements is a group by itself. ``lengths`` must be the same on all ranks, as the groups follow
    from them.
    """
    by_type: dict[tuple[torch.dtype, torch.device], list[K]] = {}
    for key, tensor in tensors.items():
        by_type.setdefault((tensor.dtype, tensor.device), []).append(key)
    for keys in by_type.values():
        group: list[K] = []
        elements = 0
        for key in keys:
            if group and elements + lengths[key] > max_elements:
                yield group
                group, elements = [], 0
            group.append(key)
            elements += lengths[key]
        yield group
