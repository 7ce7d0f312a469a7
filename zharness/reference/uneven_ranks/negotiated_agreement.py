"""Detect that ranks run different collectives. Inside ``engine.uneven()``, run these in negotiated rounds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from zharness.comm import Comm
from zharness.reference.collectives import CollectiveKind, RunCollective
from zharness.reference.layout import ModelParam
from zharness.reference.uneven_ranks.collective_order import CollectiveOrder
from zharness.reference.uneven_ranks.negotiation import (
    ALL_DTYPES,
    CollectiveMode,
    CollectiveNegotiation,
    CollectiveRequest,
    RequestKind,
)


class NegotiatedAgreement:
    """Implements ``RankAgreement``: compares checksums outside ``engine.uneven()``, and negotiates rounds inside.

    ``model_params`` has the same order on all ranks.
    """

    def __init__(self, model_params: Sequence[ModelParam], comm: Comm) -> None:
        self._model_params = model_params
        self._param_indices = {param.name: index for index, param in enumerate(model_params)}
        self._negotiation = CollectiveNegotiation(model_params, comm)
        self.remote_grad_callbacks = self._negotiation.remote_grad_callbacks
        self._order = CollectiveOrder(comm)

    @property
    def is_even(self) -> bool:
        """True if all ranks now run the same collectives, False inside ``allow_uneven_ranks``."""
        return self._negotiation.mode is CollectiveMode.DIRECT

    def record(self, kind: CollectiveKind, params: Sequence[ModelParam], dtype: torch.dtype) -> None:
        """Add a collective to the checksum that ``check_same_collectives`` compares between ranks."""
        self._order.record(int(kind), [self._param_indices[param.name] for param in params], dtype)

    def check_same_collectives(self) -> None:
        """Raise UsageError on every rank if the ranks ran different collectives since the last check.

        This is a collective.
        """
        self._order.check_same_on_all_ranks(self._model_params[0].parameter.device)

    def allow_uneven_ranks(self, run: RunCollective) -> AbstractContextManager[None]:
        """Let ranks request different collectives inside the block. The end of the block is a collective."""
        return self._negotiation.allow_uneven_ranks(run)

    def run_requested(self, kind: CollectiveKind, param: ModelParam, local_tensor: Tensor) -> Tensor:
        """Run one round of the negotiation, and return the result of this rank's request. This is a collective."""
        index = self._param_indices[param.name]
        request = CollectiveRequest(RequestKind(kind), index, ALL_DTYPES.index(local_tensor.dtype))
        return self._negotiation.run_round(request, local_tensor)[request]

    def require_even(self, operation: str) -> None:
        """Raise UsageError inside ``engine.uneven()``, where ``operation`` is not available."""
        self._negotiation.require_even(operation)
