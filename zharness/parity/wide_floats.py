"""Run a model in float64 although its forward names narrower dtypes, as for a mask or a cast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

NARROW = (torch.float32, torch.bfloat16, torch.float16)
CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)


class _WideFloats(TorchFunctionMode):
    """A mode in which every narrower floating-point dtype that a call names is float64."""

    def __torch_function__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in CASTS:
            return args[0].double()
        named = {key: widen(value) for key, value in (kwargs or {}).items()}
        return func(*map(widen, args), **named)


def widen(value: Any) -> Any:
    """Return float64 for a narrower dtype, and any other argument unchanged."""
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value


@contextmanager
def widen_named_dtypes() -> Iterator[None]:
    """Return a context in which a forward of a float64 model computes only in float64.

    torch.autocast does not cast float64 tensors.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _WideFloats():
            yield
    finally:
        torch.set_default_dtype(default)
