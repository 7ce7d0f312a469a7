"""Stage 3's collectives, one parameter at a time: as they are asked for, or, where ranks differ, in rounds.

At stage 3 reading a parameter is a collective, so a branch that one rank takes and another does not would leave the one
waiting for the other. Inside ``engine.uneven()`` nobody waits: before each collective every rank says which one it
wants, and all ranks take part in all that anybody wants. A rank without a gradient adds zeros, and what it owns of the
sum is added to its parameter's gradient. A rank that has left the block goes on taking part until all have left it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, IntEnum

import torch
from torch import Tensor

from zharness.comm import Comm
from zharness.errors import UsageError
from zharness.reference.buckets import Bucket
from zharness.reference.layout import ModelParam, all_gather_full_tensor, all_gather_rows


class CollectiveMode(Enum):
    """How this rank's collectives run."""

    DIRECT = "as they are asked for, alike on all ranks"
    NEGOTIATED = "after every rank has said what it wants"


class RequestKind(IntEnum):
    """What a rank wants of the others in one round."""

    NOTHING = 0
    ALL_GATHER_PARAM = 1
    ALL_GATHER_GRAD = 2
    REDUCE_GRAD = 3
    FAILED = 4


ALL_DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)


@dataclass(frozen=True, order=True)
class CollectiveRequest:
    """One collective: its kind, the parameter's place in the model, and the dtype's in DTYPES."""

    kind: RequestKind
    param_index: int = 0
    dtype_index: int = 0


class ShardCollectives:
    """The collectives on sharded parameters. ``originals`` are the model's, in the one order of all ranks.

    ``credits`` get this rank's share of the mean gradient of a parameter that only other ranks used.
    """

    def __init__(self, model_params: Sequence[ModelParam], comm: Comm, divisor: int) -> None:
        self.remote_grad_callbacks: list[Callable[[ModelParam, Tensor], None]] = []
        self._model_params = model_params
        self._comm = comm
        self._divisor = divisor
        self._param_indices = {original.name: index for index, original in enumerate(model_params)}
        self._mode = CollectiveMode.DIRECT
        self._order_checksum = 0

    def all_gather_bucket(self, bucket: Bucket, row: Tensor) -> Tensor:
        """Every rank's ``row`` of the bucket: shape (N, length of a row). Collective."""
        self._record_collective(RequestKind.ALL_GATHER_PARAM, bucket.members, row.dtype)
        return all_gather_rows(row, self._comm)

    def all_gather_param(self, param: ModelParam, dtype: torch.dtype) -> Tensor:
        """The full parameter, cast before it crosses the wire. Collective."""
        return self._run_or_negotiate(RequestKind.ALL_GATHER_PARAM, param, param.parameter.detach().to(dtype))

    def all_gather_grad(self, param: ModelParam, shard: Tensor) -> Tensor:
        """The full tensor of every rank's ``shard``, divided: the adjoint of ``mean``. Collective."""
        return self._run_or_negotiate(RequestKind.ALL_GATHER_GRAD, param, shard) / (
            self._remaining_divisor(param) * param.predivide_factor
        )

    def reduce_grad(self, param: ModelParam, full: Tensor) -> Tensor:
        """This rank's shard of the mean of ``full``, summed in the wire's dtype. Collective."""
        return self._run_or_negotiate(RequestKind.REDUCE_GRAD, param, param.cast_for_reduce(full))

    def reduce_grads(self, params: Sequence[ModelParam], full_grads: Sequence[Tensor]) -> list[Tensor]:
        """``mean`` of several parameters of one set of dtypes; in one collective, unless ranks differ."""
        if not self.is_even or not params:
            return [self.reduce_grad(original, full) for original, full in zip(params, full_grads, strict=True)]
        bucket, formats = Bucket(tuple(params)), params[0].dtypes
        self._record_collective(RequestKind.REDUCE_GRAD, params, formats.reduce_dtype)
        row = bucket.reduce_scatter(
            [o.cast_for_reduce(full) for o, full in zip(params, full_grads, strict=True)], self._comm
        )
        mean = row.to(formats.param_dtype) / self._remaining_divisor(params[0])
        return list(torch.split(mean, bucket.shard_lengths))

    @property
    def is_even(self) -> bool:
        """Whether all ranks ask for the same collectives now."""
        return self._mode is CollectiveMode.DIRECT

    @contextmanager
    def allow_uneven_ranks(self) -> Iterator[None]:
        """Inside, ranks may ask for different collectives. Collective at its end.

        Raises UsageError inside another such block, and where another rank raised in it.
        """
        self.require_even("another uneven()")
        self._mode = CollectiveMode.NEGOTIATED
        last = CollectiveRequest(RequestKind.FAILED)
        try:
            yield
            last = CollectiveRequest(RequestKind.NOTHING)
        finally:
            try:
                while self._mode is CollectiveMode.NEGOTIATED and self._negotiate_round(last, None):
                    pass
            finally:
                self._mode = CollectiveMode.DIRECT

    def require_even(self, operation: str) -> None:
        """Raises UsageError inside ``uneven``, where ``what`` cannot be had."""
        if self._mode is CollectiveMode.NEGOTIATED:
            raise UsageError(f"{operation} was asked for inside uneven(); leave that block before it")

    def _remaining_divisor(self, param: ModelParam) -> float:
        """Autograd rounds a gradient to its parameter's dtype: where the master's is wider, it divides, not before."""
        return 1 if param.has_master else self._divisor / param.predivide_factor

    def _run_or_negotiate(self, kind: RequestKind, param: ModelParam, local_tensor: Tensor) -> Tensor:
        want = CollectiveRequest(kind, self._param_indices[param.name], ALL_DTYPES.index(local_tensor.dtype))
        if not self.is_even:
            return self._negotiate_round(want, local_tensor)[want]
        self._record_collective(kind, [param], local_tensor.dtype)
        return self._run_collective(want, local_tensor)

    def _record_collective(self, kind: RequestKind, params: Sequence[ModelParam], dtype: torch.dtype) -> None:
        """Add a collective that all ranks are taken to run alike to the checksum of them, for ``settle``."""
        told = (int(kind), [self._param_indices[original.name] for original in params], str(dtype))
        self._order_checksum = zlib.crc32(repr(told).encode(), self._order_checksum)

    def check_same_collectives(self) -> None:
        """Raises UsageError on every rank where ranks gathered or reduced different parameters at once. Collective.

        Equal shapes go through such a collective in silence, and one rank's values are then taken for another's.
        """
        mine = torch.tensor([self._order_checksum], device=self._model_params[0].parameter.device)
        self._order_checksum = 0
        trails = self._comm.all_gather(mine.new_empty(self._comm.world_size), mine).tolist()
        others = [rank for rank, trail in enumerate(trails) if trail != trails[0]]
        if others:
            raise UsageError(
                f"rank {', '.join(map(str, others))} used different parameters than rank 0, or in another order, since "
                "the last step, and their values and gradients were mixed: call zero_grad(), and run forwards and "
                "backwards that differ between ranks inside `with engine.uneven():`"
            )

    def _negotiate_round(
        self, request: CollectiveRequest, local_tensor: Tensor | None
    ) -> dict[CollectiveRequest, Tensor]:
        """Every rank's want, fulfilled; empty when no rank has any. Raises UsageError when another rank has failed.

        After a failure no rank starts another round: all have learnt of it in this one.
        """
        told = torch.tensor(
            [request.kind, request.param_index, request.dtype_index], device=self._model_params[0].parameter.device
        )
        rows = self._comm.all_gather(told.new_empty(3 * self._comm.world_size), told).view(-1, 3).tolist()
        wants = [CollectiveRequest(RequestKind(kind), index, dtype) for kind, index, dtype in rows]
        failed = [rank for rank, other in enumerate(wants) if other.kind is RequestKind.FAILED]
        if failed:
            self._mode = CollectiveMode.DIRECT
            if request.kind is RequestKind.FAILED:
                return {}
            raise UsageError(f"rank {failed[0]} raised inside uneven(), so the other ranks cannot go on either")
        asked = sorted(set(wants) - {CollectiveRequest(RequestKind.NOTHING)})
        return {each: self._run_collective(each, local_tensor if each == request else None) for each in asked}

    def _run_collective(self, request: CollectiveRequest, local_tensor: Tensor | None) -> Tensor:
        """One collective; a rank that did not want it has no ``mine``."""
        original, dtype = self._model_params[request.param_index], ALL_DTYPES[request.dtype_index]
        parameter, layout = original.parameter, original.layout
        if request.kind is RequestKind.ALL_GATHER_PARAM:
            return all_gather_full_tensor(parameter.detach().to(dtype), layout, self._comm)
        if request.kind is RequestKind.ALL_GATHER_GRAD:
            return all_gather_full_tensor(
                parameter.new_zeros(layout.shard_length, dtype=dtype) if local_tensor is None else local_tensor,
                layout,
                self._comm,
            )
        full = parameter.new_zeros(layout.shape, dtype=dtype) if local_tensor is None else local_tensor
        shard = Bucket((original,)).reduce_scatter([full], self._comm).to(original.dtypes.param_dtype)
        mean = shard / self._remaining_divisor(original)
        if local_tensor is None and parameter.requires_grad:
            for credit in self.remote_grad_callbacks:
                credit(original, mean)
        return mean
