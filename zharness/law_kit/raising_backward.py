"""A backward that raises halfway on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import backward


class DeliberateError(Exception):
    """Raised on purpose within a backward or a recomputation."""


class RaisingBackward(torch.autograd.Function):
    """Returns its input unchanged; its backward raises DeliberateError."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        """Return a copy of ``hidden``."""
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Raise DeliberateError."""
        raise DeliberateError


def run_with_raising_backward(block: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """Run ``block`` on an input whose backward raises, after the backward of ``block`` and all later layers."""
    broken: Tensor = RaisingBackward.apply(hidden)  # type: ignore[no-untyped-call]
    return block(broken)


def backward_raises(loss: Tensor, retain_graph: bool = False) -> Tensor:
    """Return 1 if the DeliberateError within the backward of ``loss`` reaches the caller, 0 if it is lost."""
    try:
        backward(loss, retain_graph=retain_graph)
    except DeliberateError:
        return torch.ones(1)
    return torch.zeros(1)
