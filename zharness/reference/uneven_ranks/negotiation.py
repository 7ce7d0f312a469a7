"""Run collectives in rounds, for ranks that use different parameters inside ``engine.uneven()`` (stage 3).

At stage 3 reading a parameter is a collective, so a branch that one rank takes and another does not would hang. Inside
``engine.uneven()`` the collectives run in rounds: every rank announces the collective that it needs, and all ranks take
part in every collective that any rank announced. A rank that needs no result contributes zeros (or its shard of the
parameter). If only other ranks computed a gradient that was reduced, this rank adds its share of the mean to the
parameter's gradient. A rank that has left the block keeps taking part until all ranks have left the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, IntEnum

import torch
from torch import Tensor

from zharness.comm import Comm
from zharness.errors import UsageError
from zharness.reference.collectives import CollectiveKind, RunCollective
from zharness.reference.layout import ModelParam


class CollectiveMode(Enum):
    """The mode in which this rank's collectives run: immediately, or in negotiated rounds."""

    DIRECT = "immediately: all ranks run the same collectives in the same order"
    NEGOTIATED = "in rounds: every rank announces a collective, then all ranks run every announced one"


class RequestKind(IntEnum):
    """The announcement of a rank for one round: a collective, the normal end of its block (NOTHING), or a failure."""

    NOTHING = 0
    ALL_GATHER_PARAM = CollectiveKind.ALL_GATHER_PARAM
    ALL_GATHER_GRAD = CollectiveKind.ALL_GATHER_GRAD
    REDUCE_GRAD = CollectiveKind.REDUCE_GRAD
    FAILED = 4


# Ranks exchange a dtype as its index in this list, which is the same on every rank.
ALL_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


@dataclass(frozen=True, order=True)
class CollectiveRequest:
    """One collective that a rank announces for a round.

    ``param_index`` is the index of the parameter in the model, and ``dtype_index`` the index of the dtype in
    ALL_DTYPES.
    """

    kind: RequestKind
    param_index: int = 0
    dtype_index: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensors that the collective sends."""
        return ALL_DTYPES[self.dtype_index]


class CollectiveNegotiation:
    """Runs the collectives of one engine in rounds inside ``allow_uneven_ranks``.

    If only other ranks computed a parameter's gradient, each of ``remote_grad_callbacks`` is called with this rank's
    share of the mean gradient.
    """

    def __init__(self, model_params: Sequence[ModelParam], comm: Comm) -> None:
        self.mode = CollectiveMode.DIRECT
        self.remote_grad_callbacks: list[Callable[[ModelParam, Tensor], None]] = []
        self._model_params = model_params
        self._comm = comm
        self._run: RunCollective | None = None

    @contextmanager
    def allow_uneven_ranks(self, run: RunCollective) -> Iterator[None]:
        """Let ranks request different collectives inside the block. The end of the block is a collective.

        ``run`` runs one collective. Raises UsageError inside another such block, and if another rank raised inside
        this block.
        """
        self.require_even("another uneven()")
        self._run = run
        self.mode = CollectiveMode.NEGOTIATED
        last_request = CollectiveRequest(RequestKind.FAILED)
        try:
            yield
            last_request = CollectiveRequest(RequestKind.NOTHING)
        finally:
            try:
                while self.mode is CollectiveMode.NEGOTIATED and self.run_round(last_request, None):
                    pass
            finally:
                self.mode = CollectiveMode.DIRECT

    def require_even(self, operation: str) -> None:
        """Raise UsageError inside ``engine.uneven()``, where ``operation`` is not available."""
        if self.mode is CollectiveMode.NEGOTIATED:
            raise UsageError(f"{operation} was requested inside uneven(); end that block first")

    def run_round(self, request: CollectiveRequest, local_tensor: Tensor | None) -> dict[CollectiveRequest, Tensor]:
        """Run every collective that any rank requests in this round, and return the results by request.

        This is a collective. The returned dictionary is empty if no rank requests a collective. Raises UsageError if
        another rank has failed; all ranks see that failure in the same round, so no rank starts another round.
        """
        device = self._model_params[0].parameter.device
        row = torch.tensor([request.kind, request.param_index, request.dtype_index], device=device)
        rows = self._comm.all_gather(row.new_empty(3 * self._comm.world_size), row).view(-1, 3).tolist()
        requests = [CollectiveRequest(RequestKind(kind), index, dtype) for kind, index, dtype in rows]
        failed_ranks = [rank for rank, other in enumerate(requests) if other.kind is RequestKind.FAILED]
        if failed_ranks:
            self.mode = CollectiveMode.DIRECT
            if request.kind is RequestKind.FAILED:
                return {}
            raise UsageError(f"rank {failed_ranks[0]} raised inside uneven(), so the other ranks cannot continue")
        announced = sorted(set(requests) - {CollectiveRequest(RequestKind.NOTHING)})
        return {other: self._take_part(other, local_tensor if other == request else None) for other in announced}

    def _take_part(self, request: CollectiveRequest, local_tensor: Tensor | None) -> Tensor:
        """Run one collective and return its result; ``local_tensor`` is None if this rank did not request it."""
        assert self._run is not None, "rounds run inside allow_uneven_ranks"
        param, kind = self._model_params[request.param_index], CollectiveKind(request.kind)
        if local_tensor is not None:
            return self._run(kind, param, local_tensor)
        result = self._run(kind, param, _make_contribution(request, param))
        if request.kind is RequestKind.REDUCE_GRAD and param.parameter.requires_grad:
            for callback in self.remote_grad_callbacks:
                callback(param, result)
        return result


def _make_contribution(request: CollectiveRequest, param: ModelParam) -> Tensor:
    """Return what a rank sends in a collective that it did not request: its shard of the parameter, or zeros."""
    if request.kind is RequestKind.ALL_GATHER_PARAM:
        return param.parameter.detach().to(request.dtype)
    shape = (param.layout.shard_length,) if request.kind is RequestKind.ALL_GATHER_GRAD else param.layout.shape
    return param.parameter.new_zeros(shape, dtype=request.dtype)
