"""Helpers of several tests of the reference engine: bitwise equality by name, and a backward that raises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def assert_same(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Assert that both have the same names, with bitwise equal tensors."""
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(got[name], value), name


class Breaking(torch.autograd.Function):
    """Returns a copy of its input; its backward raises ``ValueError("broken on purpose")``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("broken on purpose")
