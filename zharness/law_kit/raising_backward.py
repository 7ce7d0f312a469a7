"""Run a backward that raises an exception on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import backward


class DeliberateError(Exception):
    """The exception that a law raises on purpose in a backward or in the recomputation of a checkpointed block."""


class RaisingBackward(torch.autograd.Function):
    """An autograd.Function that returns a copy of its input in forward and raises DeliberateError in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        """Return a copy of ``hidden``."""
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Raise DeliberateError."""
        raise DeliberateError


def run_with_raising_backward(block: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """Run ``block`` and return its output. The backward raises DeliberateError after it has run through ``block``."""
    broken: Tensor = RaisingBackward.apply(hidden)  # type: ignore[no-untyped-call]
    return block(broken)


def backward_raises(loss: Tensor, retain_graph: bool = False) -> Tensor:
    """Run the backward of ``loss``, and return 1 if DeliberateError reaches the caller, or 0 if it does not."""
    try:
        backward(loss, retain_graph=retain_graph)
    except DeliberateError:
        return torch.ones(1)
    return torch.zeros(1)
