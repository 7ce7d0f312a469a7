"""Bytes behind tensors, counted from their storages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def storage_bytes(values: Iterable[Any]) -> int:
    """Bytes behind the tensors among ``values``; storages that several of them share count once."""
    storages = (value.untyped_storage() for value in values if isinstance(value, Tensor))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def storage_bytes_by_dtype(values: Iterable[Any]) -> dict[str, int]:
    """``storage_bytes`` of the tensors of each dtype, by its name."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    names = sorted({str(tensor.dtype) for tensor in tensors})
    return {n.removeprefix("torch."): storage_bytes(t for t in tensors if str(t.dtype) == n) for n in names}
