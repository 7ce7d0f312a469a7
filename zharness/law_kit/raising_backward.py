"""A backward that raises halfway, on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import backward


class DeliberateError(Exception):
    """Raised within a backward."""


class RaisingBackward(torch.autograd.Function):
    """Passes its input through; its backward raises."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise DeliberateError


def run_with_raising_backward(block: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """The block on something whose backward raises, so that the layers behind it have their gradients already."""
    broken: Tensor = RaisingBackward.apply(hidden)  # type: ignore[no-untyped-call]
    return block(broken)


def backward_raises(loss: Tensor, retain_graph: bool = False) -> Tensor:
    """1 where the backward of ``loss`` raises what was raised within it, 0 where that is lost."""
    try:
        backward(loss, retain_graph=retain_graph)
    except DeliberateError:
        return torch.ones(1)
    return torch.zeros(1)
